"""Engines and the garbage collector: start-up is set aside while one is open, and nothing of a
closed engine stays for it.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from photon_ext.engine import Engine
from photon_ext.errors import ConfigError
from photon_ext.sampling import SamplingParams, from_callable
from tests.engine.tiny import CONFIG, WEIGHTS
from tests.serve.processes import until

pytestmark = pytest.mark.usefixtures("collector")


def make(**options: Any) -> Engine:
    return Engine.from_weights(
        CONFIG, WEIGHTS, **{"max_rows": 2, "max_len": 32, "buckets": (2,), **options}
    )


def use(engine: Engine) -> None:
    engine.generate([[1, 2], [3]], SamplingParams(max_new_tokens=4, ignore_eos=True))


def memory_of(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    """An engine's tensors: its row table, its KV pool."""
    pipeline: Any = engine._pipeline
    return [
        weakref.ref(pipeline._runtime.tables.row_state),
        weakref.ref(pipeline._spec.forward.__self__._kv),
    ]


@pytest.mark.parametrize("graph", [True, False])
def test_start_up_is_set_aside_until_the_engine_is_closed(graph: bool) -> None:
    with make(graph=graph) as engine:
        assert gc.get_freeze_count() > 10_000
        assert not any(each is engine for each in gc.get_objects()), (
            "the engine is set aside itself"
        )
        use(engine)
    assert gc.get_freeze_count() == 0


def test_an_engine_may_leave_the_collector_alone() -> None:
    with make(freeze=False) as engine:
        use(engine)
        assert gc.get_freeze_count() == 0
    with pytest.raises(ConfigError, match="freeze is 1; give True or False"):
        make(freeze=1)


def test_an_engine_is_freed_while_another_keeps_its_memory_set_aside() -> None:
    """Refcounts alone free it: a cycle through a closed engine would keep device memory until
    the last engine ends.
    """
    for used in (False, True):
        first, second = make(), make()
        if used:
            use(first)
        found = memory_of(first)
        first.close()
        del first
        assert [ref() for ref in found] == [None, None]
        assert gc.get_freeze_count() > 0, "the second is open"
        second.close()
        assert gc.get_freeze_count() == 0


def test_an_engine_that_is_dropped_unused_ends_its_part() -> None:
    engine = make()
    found = memory_of(engine)
    del engine
    assert gc.get_freeze_count() == 0
    assert [ref() for ref in found] == [None, None]


@pytest.mark.parametrize("end", ["crash", "closed by a constraint"])
def test_an_engine_that_ended_by_itself_is_kept_by_nobody(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who makes a new one after a crash needs the memory of the old one, closed or not."""
    engine = make()
    if end == "crash":
        monkeypatch.setattr(engine._pipeline, "commit", crash)
        assert engine.generate([[1]])[0].finish_reason == "error"
    else:
        constraint = from_callable(
            lambda tokens, engine=engine: [3] if engine.close() is None else []
        )  # type: ignore[misc]
        assert (
            engine.generate([[1]], SamplingParams(constraint=constraint))[0].finish_reason
            == "cancelled"
        )
        del constraint
    engine._thread.join()
    found = memory_of(engine)
    monkeypatch.undo()
    del engine
    assert gc.get_freeze_count() == 0
    gc.collect()  # a crash's traceback is part of a cycle
    assert [ref() for ref in found] == [None, None]


def crash() -> None:
    raise OSError("the device is gone")


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_leave_nothing_for_the_collector(depth: int) -> None:
    """What a token keeps, its text and its id, the collector does not look at: long answers
    bring no collection about.
    """
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    with make(max_len=512, depth=depth) as engine:
        engine.generate([[1, 2], [3]], params)
        gc.disable()
        try:
            before = len(gc.get_objects())
            requests = engine.submit([1, 2], params, n=2)
            assert [len(request.result().token_ids) for request in requests] == [400, 400]
            # the columns of a batch, one for each step, stay until the engine thread rests
            until(lambda: len(gc.get_objects()) - before < 100, 30, lambda: "800 tokens")
        finally:
            gc.enable()


def test_many_engines_leave_nothing() -> None:
    def serve() -> None:
        for _ in range(3):
            with make() as engine:
                use(engine)

    serve()
    gc.collect()
    before = len(gc.get_objects())
    serve()
    gc.collect()
    assert len(gc.get_objects()) - before < 30
    assert gc.get_freeze_count() == 0
