"""An engine on the simulated device whose loop a test turns, so that it can look at every page."""

from __future__ import annotations

from typing import Any

from photon_ext.engine import Engine
from photon_ext.engine.request import Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.layout import NO_PAGE
from photon_ext.runtime import Pipeline
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Scheduler
from photon_ext.testing import ToyForward
from photon_ext.testing.poison import POISON
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import WatchedDevice

PAGE, MAX_LEN, ROWS = 4, 64, 4


class Stepped:
    """An engine whose loop the test turns itself."""

    def __init__(
        self, depth: int, num_pages: int, rows: int = ROWS, max_len: int = MAX_LEN, **options: Any
    ) -> None:
        device = WatchedDevice(rows, max_len, depth, PAGE)
        self.device = device
        self.forward = ToyForward(device, VOCAB, num_pages)
        self.engine = Engine(
            device, self.forward, vocab_size=VOCAB, num_pages=num_pages, chunk=8, **options
        )
        self.loop = self.engine._loop
        self.scheduler: Scheduler = self.engine._scheduler
        self.pipeline: Pipeline = self.engine._pipeline

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> Request:
        asked = RequestOptions.of(**options)
        sequence = self.engine._input.make(prompt, params, False, asked)
        self.engine._queue.post([sequence])
        request: Request = sequence.request
        return request

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
        assert counts == pool._counts
        for row in self.pipeline.rows:
            behind = self.device.state.tables.page_table[row.index, len(row.pages) :]
            assert {*behind.tolist()} <= {NO_PAGE, POISON}, f"{row} has more pages"
        cache = pager._cache
        for page, (before, tokens) in cache._keys.items():
            assert before is None or before in cache._keys, "a page whose beginning has left"
            if cache.is_written(page):
                assert tuple(self.forward._kv[page].tolist()) == tokens, f"page {page}"
