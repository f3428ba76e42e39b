"""An engine on the simulated device whose loop a test turns, so that it can look at every page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from photon_ext.engine.request import Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.layout import NO_PAGE
from photon_ext.runtime import Pipeline
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Scheduler
from photon_ext.scheduling.prefix_cache import token_bytes
from photon_ext.testing import Chooser, SimAdapters, ToyForward, ToyModel
from photon_ext.testing.poison import POISON
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import WatchedDevice, engine_of

PAGE, MAX_LEN, ROWS = 4, 64, 4
TOY = ToyModel(VOCAB)
# its decode steps keep other keys and values than its chunks, as on a GPU
MARKED = ToyModel(VOCAB, decode_mark=1 << 20)


ADAPTERS = ("1", "2", "3")


def adapter_value(name: str | None) -> int:
    """What an adapter adds to the toy model's tokens."""
    return 0 if name is None else int(name) << 24


def adapted(model: ToyModel, name: str | None) -> ToyModel:
    """The model with an adapter."""
    return ToyModel(model.vocab_size, model.seed, model.decode_mark, adapter_value(name))


class Stepped:
    """An engine whose loop the test turns itself."""

    def __init__(
        self,
        depth: int,
        num_pages: int,
        rows: int = ROWS,
        max_len: int = MAX_LEN,
        model: ToyModel = TOY,
        slots: int = 0,
        chooser: Chooser | None = None,
        **options: Any,
    ) -> None:
        """`slots`: of adapters, which are loaded as "1", "2", "3"; see `adapted`."""
        device = WatchedDevice(rows, max_len, depth, PAGE, chooser)
        self.device = device
        adapters = SimAdapters(device.device, slots) if slots else None
        self.forward = ToyForward(
            device, VOCAB, num_pages, decode_mark=model.decode_mark, adapters=adapters
        )
        options = {"chunk": 8, "adapters": adapters, **options}
        self.engine = engine_of(device, self.forward, VOCAB, num_pages, **options)
        for name in ADAPTERS if slots else ():
            self.engine.load_lora(name, Path(str(adapter_value(name))))
        self.loop = self.engine._loop
        self.scheduler: Scheduler = self.engine._scheduler
        self.pipeline: Pipeline = self.engine._pipeline

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> Request:
        asked = RequestOptions.of(**options)
        sequence = self.engine._input.make(prompt, params, False, asked)
        self.engine._queue.post([sequence])
        return sequence.sink

    def turn(self) -> bool:
        """One turn of the loop; False where there is nothing to do."""
        if not self.loop._has_work() and self.engine._queue._arrived.empty():
            return False
        self.loop._collect()
        self.loop._turn()
        return True

    def run(self) -> None:
        while self.turn():
            pass

    def check(self) -> None:
        """I9, I12 and I13."""
        pager, pool = self.scheduler._pager, self.scheduler.pool
        assert pool.free + pool.held + pool.cached == pool.num_pages
        counts: dict[int, int] = {}
        for row in {*self.pipeline.rows, *self.scheduler.released}:
            for page in row.pages:
                counts[page] = counts.get(page, 0) + 1
        assert counts == {page: 1 + pool._other_holders.get(page, 0) for page in pool._held}
        for row in self.pipeline.rows:
            behind = self.device.state.tables.page_table[row.index, len(row.pages) :]
            assert {*behind.tolist()} <= {NO_PAGE, POISON}, f"{row} has more pages"
        cache = pager._cache
        for page, (before, tokens) in cache._keys.items():
            is_root = not isinstance(before, int)
            assert is_root or before in cache._keys, "a page whose beginning has left"
            if cache.is_written(page):
                value = self._value_of(page)
                kept = tuple(token - value for token in self.forward._kv[page].tolist())
                assert token_bytes(kept) == tokens, f"page {page}"

    def _value_of(self, page: object) -> int:
        """The adapter of a cached page: what its tokens have more than they are."""
        keys = self.scheduler._pager._cache._keys
        while isinstance(page, int):
            page = keys[page][0]
        adapters = self.engine._adapters._adapters.values()
        return next((one.weights for one in adapters if page == (None, one.key)), 0)
