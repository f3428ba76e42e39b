"""The simulated device against the real one: the same tokens, ends and counts from the runtime."""

from __future__ import annotations

from typing import Any

import pytest

from photon_ext.errors import PipelineError
from photon_ext.layout import NO_TOKEN, RecordFlag
from photon_ext.runtime import Runtime
from photon_ext.runtime.ports import RuntimePort
from photon_ext.runtime.step import StepKey
from photon_ext.testing import Driver, Request, SimRuntime, ToyModel

VOCAB = 40


@pytest.mark.parametrize("simulated", [False, True])
def test_a_step_without_its_tokens_is_an_error_and_no_token(
    monkeypatch: pytest.MonkeyPatch, simulated: bool
) -> None:
    runtime: RuntimePort
    if simulated:
        runtime = SimRuntime(2, 32, 2, page_size=4, max_stop_ids=2)
    else:
        runtime = Runtime(
            max_rows=2, max_len=32, depth=2, device="cpu", page_size=4, max_stop_ids=2
        )
    driver = Driver(runtime, pages=20, vocab_size=VOCAB, chunk=4, graph=False)
    kind: type[Any] = type(driver.pipeline._slots[0])
    launch = kind.launch

    def launch_with_consumed_ids(
        slot: object, key: StepKey, segments: object, staged: list[int], *rest: object
    ) -> object:
        return launch(slot, key, segments, [NO_TOKEN] * len(staged), *rest)

    monkeypatch.setattr(kind, "launch", launch_with_consumed_ids)
    with pytest.raises(PipelineError, match=f"flags {int(RecordFlag.DEAD)};"):
        driver.run(Request((1, 2, 3), 4))
    assert [outcome.tokens for outcome in driver.outcomes] == [[]]


def follow(tokens: tuple[int, ...]) -> set[int]:
    return {len(tokens), 16 + len(tokens)}


@pytest.mark.emulated
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_driver_gives_the_same_on_the_real_runtime(depth: int, constrained: bool) -> None:
    model = ToyModel(VOCAB)
    asked = [
        Request((1, 2, 3), 9, stop_token_ids=(model.generate(Request((1, 2, 3), 4))[3],)),
        Request((5,) * 11, 6, temperature=0.9, seed=123456789012),
        Request((4,), 12, allowed=follow if constrained else None),
        Request((9, 8), 1),
    ]

    def serve(runtime: RuntimePort) -> tuple[list[tuple[int, ...]], list[object], tuple[int, ...]]:
        driver = Driver(runtime, pages=20, vocab_size=VOCAB, chunk=4, graph=False)
        tokens = driver.run(*asked)
        stats = driver.pipeline.stats
        counts = (stats.steps, stats.decode_steps, stats.quiet_steps, stats.zombie_rows)
        return tokens, [outcome.finish for outcome in driver.outcomes], counts

    real = serve(
        Runtime(max_rows=2, max_len=32, depth=depth, device="cpu", page_size=4, max_stop_ids=2)
    )
    simulated = serve(SimRuntime(2, 32, depth, page_size=4, max_stop_ids=2))
    assert real == simulated
    assert real[0] == [model.generate(request) for request in asked]
