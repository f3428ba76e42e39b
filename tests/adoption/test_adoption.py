"""README, "Use it from your engine": somebody else's loop, ours in its place, the same tokens."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks import adoption, stock_loop  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest):
    return adoption.build_model("tiny", torch.float32, torch.device(request.param))


def test_the_example_is_short():
    lines = [line for line in adoption.readme_block().splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.parametrize("prompt", [[3], [3, 5, 7, 11, 13], list(range(40))])
def test_same_tokens(model, prompt):
    assert adoption.readme_decode()(model, prompt, 24, ()) == stock_loop.decode(model, prompt, 24, ())


def test_same_end_at_a_stop_id(model):
    free = stock_loop.decode(model, [1, 2, 3], 24, ())
    stop = free[9]
    stopped = adoption.readme_decode()(model, [1, 2, 3], 24, (stop,))
    assert stopped == stock_loop.decode(model, [1, 2, 3], 24, (stop,)) == free[: free.index(stop) + 1]


def test_measures_before_and_after(model):
    entry = adoption.measure(model, [1, 2, 3], (4, 24))
    assert entry["tokens_equal"] == 24
    print(f"ms/step before {entry['ms_per_step_before']:.2f}, after {entry['ms_per_step_after']:.2f}")
    assert entry["ms_per_step_before"] > 0
    assert entry["ms_per_step_after"] > 0
