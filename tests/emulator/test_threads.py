"""Warps and thread blocks of the emulator: what is right gives the right result in every order of
threads, and planted bugs are found.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.emulator.conftest import SEEDS, Emulator, EmulatorError
from tests.emulator.planted import (
    LANES,
    MISSING_BARRIER,
    NO_BUG,
    THREADS,
    floats,
)
from tests.ops.numeric import ints

# --- warps ----------------------------------------------------------------------------------------


def segment_source(lane: int, source: int, width: int) -> int:
    """Where a shuffle by more or fewer lanes reads from: its own lane if the source is outside
    of its segment.
    """
    return source if source // width == lane // width else lane


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_votes_and_sums(emulator: Emulator, seed: int) -> None:
    out = floats(15, 32)
    emulator.launch("shuffle", out, seed=seed)
    pairs = [lane % 16 < 8 for lane in LANES]
    ballots = {
        0: sum(1 << lane for lane in range(8) if lane % 3 == 0),
        1: sum(1 << lane for lane in range(16, 24) if lane % 3 == 0),
    }
    expected = [
        [1.5 * (lane * 7 % 32) for lane in LANES],
        [1.5 * (lane // 8 * 8 + 3) for lane in LANES],
        [1.5 * (lane - 3 if lane >= 3 else lane) for lane in LANES],
        [1.5 * segment_source(lane, lane - 3, 16) for lane in LANES],
        [1.5 * (lane + 5 if lane < 27 else lane) for lane in LANES],
        [1.5 * segment_source(lane, lane + 5, 8) for lane in LANES],
        [1.5 * (lane ^ 9) for lane in LANES],
        [1.5 * (lane ^ 9 if lane ^ 9 < lane // 4 * 4 + 4 else lane) for lane in LANES],
        [1.5 * (lane ^ 1) for lane in LANES],
        [1.5 * (lane ^ 2) if pairs[lane] else -1.0 for lane in LANES],
        [float(ballots[lane // 16]) if pairs[lane] else -1.0 for lane in LANES],
        [1.0] * 32,
        [0.0] * 32,
        [float(sum(LANES))] * 32,
        [-9.0] * 32,
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (1, r"__shfl_xor_sync .*kernels\.cu:\d+.*(lanes 0x00000020 have ended|waits for its lane)"),
        (
            2,
            r"lanes of one warp disagree: thread \d+ of block 0 is in __shfl_xor_sync at "
            r".*kernels\.cu:\d+, others",
        ),
        (3, r"with mask 0x7fffffff, which does not name it"),
        (4, r"__shfl_sync: a lane reads from one that is not in the mask"),
    ],
)
def test_lanes_that_part_are_an_error(emulator: Emulator, how: int, message: str) -> None:
    for failure in emulator.failures("divergent", ints([0] * 32, "cpu"), how):
        assert re.search(message, failure), failure
    emulator.launch("divergent", ints([0] * 32, "cpu"), 0)


# --- blocks ---------------------------------------------------------------------------------------


def rotated(emulator: Emulator, bug: int, seed: int) -> bool:
    out = ints([[-1] * THREADS] * 3, "cpu")
    emulator.launch("rotate", out, 3, 5, bug, seed=seed)
    expected = (torch.arange(THREADS) + 5 * 33) % THREADS + torch.arange(3)[:, None] * THREADS
    return torch.equal(out.long(), expected)


def test_a_missing_barrier_gives_wrong_results_in_some_order(emulator: Emulator) -> None:
    assert all(rotated(emulator, NO_BUG, seed) for seed in SEEDS)
    assert not any(rotated(emulator, MISSING_BARRIER, seed) for seed in SEEDS)


def test_a_seed_fixes_the_order(emulator: Emulator) -> None:
    def result(seed: int) -> list[int]:
        out = ints([0] * THREADS, "cpu")
        emulator.launch("rotate", out, 1, 5, MISSING_BARRIER, seed=seed)
        return out.tolist()

    assert [result(seed) for seed in SEEDS] == [result(seed) for seed in SEEDS]
    assert len({tuple(result(seed)) for seed in SEEDS}) > 3


def test_named_barriers(emulator: Emulator) -> None:
    for seed in SEEDS:
        emulator.launch("barrier", ints([0] * 64, "cpu"), 1, 32, 2, 32, seed=seed)
        emulator.launch("barrier", ints([0] * 64, "cpu"), 3, 64, 3, 64, seed=seed)
        emulator.launch("barrier", ints([0] * 64, "cpu"), 15, 32, 1, 0, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (1, 64, 2, 64),
            r"no thread can go on:(\n  block 0, 32 threads from \d+ to \d+: at sync_threads .*: "
            r"barrier [12], where 32 of 64 have come){2}",
        ),
        ((1, 64, 1, 0), r"sync_threads at .* waits for (every|all 64) thread"),
        (
            (1, 64, 1, 32),
            r"brings (32|64) threads to sync_threads .*, but others wait there for (32|64)",
        ),
        ((1, 33, 1, 33), r"33 threads, expected a multiple of 32 up to the block's 64"),
        ((16, 32, 1, 32), r"there is no barrier 16, only 0 to 15"),
    ],
)
def test_barriers_of_a_wrong_count(
    emulator: Emulator, arguments: tuple[int, ...], message: str
) -> None:
    failures = emulator.failures("barrier", ints([0] * 64, "cpu"), *arguments)
    assert any(re.search(message, failure, re.DOTALL) for failure in failures), failures
    assert all(failures)


def test_a_barrier_that_some_threads_never_reach(emulator: Emulator) -> None:
    for failure in emulator.failures("unfinished_barrier", ints([0] * THREADS, "cpu")):
        assert re.search(
            r"__syncthreads at .*kernels\.cu:\d+|a barrier at .*kernels\.cu:\d+ waits for every "
            r"thread of the block",
            failure,
        ), failure


def test_shared_memory_holds_nans_at_first(emulator: Emulator) -> None:
    for seed in SEEDS:
        out = torch.zeros(9, THREADS)
        emulator.launch("static_shared", out, 9, seed=seed)
        assert out.isnan().all()
    out = torch.zeros(THREADS)
    emulator.launch("dynamic_shared_context", out, 0)
    assert out.isnan().all()


@pytest.mark.parametrize("place", [THREADS, THREADS + 200, -1])
def test_writes_past_the_shared_memory_are_found(emulator: Emulator, place: int) -> None:
    with pytest.raises(
        EmulatorError, match="block 0 wrote outside its 512 bytes of dynamic shared memory"
    ):
        emulator.launch("dynamic_shared_context", torch.zeros(THREADS), place)


def test_the_last_block_finds_what_the_others_wrote(emulator: Emulator) -> None:
    counter = ints([0], "cpu")
    for seed in SEEDS:
        out = floats(1)
        emulator.launch("last_block", out, floats(7), counter, 7, seed=seed)
        assert out.item() == 28
        assert counter.item() == 0


def test_loads_under_a_condition(emulator: Emulator) -> None:
    x = torch.arange(1, 129, dtype=torch.int32).view(32, 4)
    for seed in SEEDS:
        out = torch.full_like(x, -1)
        emulator.launch("fresh", out, x, seed=seed)
        assert torch.equal(out, torch.where(torch.arange(32)[:, None] % 3 == 0, x, 0))
