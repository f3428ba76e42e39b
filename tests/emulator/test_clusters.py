"""Clusters of the emulator: what is right gives the right result in every order of threads, and
planted bugs are found.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.emulator.conftest import SEEDS, Emulator, EmulatorError
from tests.emulator.planted import (
    ENDS_TOO_EARLY,
    ENTERS_TWICE,
    MISSING_ARRIVAL,
    MISSING_BARRIER,
    MISSING_FENCE,
    NEVER_AWAITED,
    NEVER_ENTERS,
    NEVER_MEETS,
    NO_BUG,
    OVERWRITE_IN_USE,
    THREADS,
    TOO_MANY_BYTES,
    UNINITIALIZED,
    USE_BEFORE_LANDING,
    WRONG_RANK,
    floats,
)
from tests.ops.numeric import ints, randn

# --- clusters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_clusters_share_their_memory(emulator: Emulator, size: int) -> None:
    first = torch.arange(16) // size * size
    expected = sum((rank + 1) * (first + rank) for rank in range(size))
    assert isinstance(expected, Tensor)
    for seed in SEEDS:
        out = floats(16)
        emulator.launch("cluster", out, 16, size, NO_BUG, seed=seed)
        assert torch.equal(out, expected.float())


def test_clusters_without_their_barriers(emulator: Emulator) -> None:
    failures = emulator.failures("cluster", floats(16), 16, 4, MISSING_BARRIER)
    assert any("where threads have ended" in failure for failure in failures)
    for failure in emulator.failures("cluster", floats(16), 16, 4, ENDS_TOO_EARLY):
        assert re.search(
            "sync_cluster .*(threads of the cluster, but|every thread of the cluster)|where "
            "threads have ended",
            failure,
        ), failure
    for failure in emulator.failures("cluster", floats(16), 16, 4, NEVER_MEETS):
        assert (
            "before which the cluster has had no barrier: the block may not have started" in failure
        )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_clusters_read_each_others_memory(emulator: Emulator, size: int) -> None:
    ranks = torch.arange(24) % size
    expected = 1000 * ((ranks + 1) % size)[:, None] + torch.arange(6 * 32)
    for seed in SEEDS:
        out = floats(24, 6 * 32)
        emulator.launch("next_block", out, 24, size, NO_BUG, seed=seed)
        assert torch.equal(out, expected.float())


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            MISSING_BARRIER,
            r"by load_from_block at .*, before which the cluster has had no barrier: the block may "
            r"not have started",
        ),
        (
            NEVER_MEETS,
            r"by load_from_block at .*, (where threads have ended|but the block has ended)",
        ),
        (
            ENDS_TOO_EARLY,
            r"sync_cluster .*(threads of the cluster, but|every thread of the "
            r"cluster)|load_from_block .* ha(s|ve) ended",
        ),
        (WRONG_RANK, r"load_from_block at .*: rank is 4, but the cluster has 4 blocks"),
    ],
)
def test_reading_anothers_memory_wrongly_is_an_error(
    emulator: Emulator, bug: int, message: str
) -> None:
    """In some order: where the blocks end together, nobody is late."""
    failures = [
        failure
        for failure in emulator.failures("next_block", floats(16, 6 * 32), 16, 4, bug)
        if failure
    ]
    assert failures
    for failure in failures:
        assert re.search(message, failure), failure


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_two_halves_of_a_cluster_barrier(emulator: Emulator, size: int) -> None:
    """Nobody meets before all have entered."""
    for seed in SEEDS:
        out, counters = ints([[-1] * 32] * 16, "cpu"), ints([0] * 16, "cpu")
        emulator.launch("halves", out, counters, 16, size, 3, NO_BUG, seed=seed)
        assert (out == size * 32 * (1 + 2 + 3)).all()


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            NEVER_ENTERS,
            r"thread \d+ of block [13] calls meet_cluster at .*, but it has not called "
            r"enter_cluster\(\) or leave_cluster\(\)",
        ),
        (
            NEVER_MEETS,
            r"calls sync_cluster at .*, but it has called enter_cluster at .* and not "
            r"meet_cluster\(\) since",
        ),
        (
            ENTERS_TWICE,
            r"calls enter_cluster at .*, but it has called enter_cluster at .* and not "
            r"meet_cluster\(\) since",
        ),
        (
            ENDS_TOO_EARLY,
            r"thread \d+ of block [13] has ended, but enter_cluster at .* waits for its "
            r"meet_cluster\(\)",
        ),
    ],
)
def test_halves_that_do_not_belong_together_are_an_error(
    emulator: Emulator, bug: int, message: str
) -> None:
    for failure in emulator.failures(
        "halves", ints([0] * 128, "cpu"), ints([0] * 2, "cpu"), 4, 2, 1, bug
    ):
        assert re.search(message, failure), failure


def test_lanes_that_enter_a_cluster_at_different_places(emulator: Emulator) -> None:
    for failure in emulator.failures("parted_cluster"):
        assert re.search(
            r"lanes of one warp disagree: thread \d+ of block [01] is in enter_cluster at", failure
        ), failure


def shared_ring_is_right(emulator: Emulator, size: int, bug: int, seed: int) -> bool:
    tiles = randn(17, 64, dtype=torch.float32, device="cpu")
    out = floats(16, 64)
    emulator.launch("shared_ring", out, tiles, len(tiles), 16, size, bug, seed=seed)
    return torch.allclose(out, tiles.sum(0).expand(16, 64), atol=1e-5)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_copies_to_all_blocks_of_a_cluster(emulator: Emulator, size: int) -> None:
    """Bytes often come to a block before it announces them."""
    assert all(shared_ring_is_right(emulator, size, NO_BUG, seed) for seed in range(20))


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            NEVER_MEETS,
            r"reaches into .* of block [0-3] of its cluster by tensor_copy_to at .*, before .*may "
            r"not have started",
        ),
        (
            MISSING_FENCE,
            r"(tensor_copy_to|arrive_in_block) .*: its barrier was initialized, but "
            r"fence_barriers\(\) has not been called",
        ),
        (
            UNINITIALIZED,
            r"(tensor_copy_to|arrive_expecting|arrive|wait_barrier) .* finds no initialized "
            r"barrier there",
        ),
        (WRONG_RANK, r"tensor_copy_to at .*: rank is 3, but the cluster has 2 blocks"),
        (
            MISSING_ARRIVAL,
            r"no thread can go on:(.|\n)*at wait_barrier .*: phase 0 lacks 2 of 4 arrivals and 0 "
            r"bytes",
        ),
    ],
)
def test_a_shared_ring_that_is_run_wrongly_is_an_error(
    emulator: Emulator, bug: int, message: str
) -> None:
    for failure in emulator.failures(
        "shared_ring", floats(4, 64), torch.zeros(17, 64), 17, 4, 2, bug
    ):
        assert re.search(message, failure), failure


def test_a_shared_ring_without_a_wait_gives_wrong_results(emulator: Emulator) -> None:
    """In some order."""

    def is_found(seed: int) -> bool:
        try:
            return not shared_ring_is_right(emulator, 4, OVERWRITE_IN_USE, seed)
        except EmulatorError:
            return True

    assert sum(map(is_found, SEEDS)) > len(SEEDS) // 2


def test_a_block_that_ends_before_its_neighbours_have_arrived(emulator: Emulator) -> None:
    """In some order: where the blocks end together, nobody is late."""
    failures = [
        f
        for f in emulator.failures(
            "shared_ring", floats(16, 64), torch.zeros(17, 64), 17, 16, 4, ENDS_TOO_EARLY
        )
        if f
    ]
    assert failures
    for failure in failures:
        assert re.search(
            r"reaches into .* by arrive_in_block at .*, but the block has ended", failure
        ), failure


def test_values_sent_to_another_block(emulator: Emulator) -> None:
    for seed in range(20):
        out = floats(2 * THREADS)
        emulator.launch("send", out, NO_BUG, seed=seed)
        assert torch.equal(out, torch.arange(1, 2 * THREADS + 1).float())
        out = torch.zeros(2 * THREADS)
        emulator.launch("send", out, USE_BEFORE_LANDING, seed=seed)
        assert out.isnan().any()


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            UNINITIALIZED,
            r"send_to_block .* finds no initialized barrier there|wait_barrier .* finds no "
            r"initialized barrier there",
        ),
        (
            MISSING_FENCE,
            r"send_to_block .*: its barrier was initialized, but fence_barriers\(\) has not been "
            r"called",
        ),
        (
            TOO_MANY_BYTES,
            r"no thread can go on:(.|\n)*at wait_barrier .*: phase 0 lacks 0 of 1 arrivals and 8 "
            r"bytes",
        ),
        (
            NEVER_AWAITED,
            r"block 0 has ended, but copies into its shared memory were still under way",
        ),
        (WRONG_RANK, r"send_to_block at .*: rank is 2, but the cluster has 2 blocks"),
        (
            ENDS_TOO_EARLY,
            r"by (send_to|arrive_in)_block at .*, but the block has ended|copies into its shared "
            r"memory were still under way",
        ),
    ],
)
def test_values_sent_wrongly_are_an_error(emulator: Emulator, bug: int, message: str) -> None:
    for failure in emulator.failures("send", floats(2 * THREADS), bug):
        assert re.search(message, failure), failure
