"""Hundreds of requests with cancels, timeouts, stops and too few pages; ten thousand on a GPU."""

from pathlib import Path

import pytest

from tests.engine.chaos import survive, survive_fast


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_once_with_its_own_tokens(depth: int, tmp_path: Path) -> None:
    now = survive(tmp_path, "cpu", 320, depth)
    assert now.preemptions > 0
    assert now.timeouts > 0
    assert now.prefix_hit_tokens > 0


def test_with_fused_kernels_in_bfloat16_too() -> None:
    now = survive_fast("cpu", 320)
    assert now.preemptions > 0
    assert now.timeouts > 0
    assert now.prefix_hit_tokens > 0


@pytest.mark.gpu
def test_ten_thousand_requests_on_a_gpu(tmp_path: Path) -> None:
    now = survive(tmp_path, "cuda", 10_000, 2)
    assert now.preemptions > 0


@pytest.mark.gpu
def test_ten_thousand_requests_on_hopper_kernels() -> None:
    now = survive_fast("cuda", 10_000)
    assert now.preemptions > 0
