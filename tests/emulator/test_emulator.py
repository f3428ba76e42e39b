"""The emulator of CUDA itself: what is right gives the right result in every order of threads,
and planted bugs are found.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT
from tests.emulator.conftest import SEEDS, Emulator, EmulatorError
from tests.ops.numeric import in_wider_tokens, ints, poisoned, randn

THREADS = 128  # of most blocks in kernels.cu
LANES = range(32)

# enum Bug in kernels.cu
NO_BUG, MISSING_BARRIER, USE_BEFORE_LANDING, OVERWRITE_IN_USE, MISSING_ARRIVAL, MISSING_FENCE = (
    range(6)
)
TOO_MANY_BYTES, TOO_MANY_ARRIVALS, NEVER_AWAITED, UNINITIALIZED, ENDS_TOO_EARLY = range(6, 11)
NEVER_ENTERS, NEVER_MEETS, ENTERS_TWICE, WRONG_RANK = range(11, 15)
NEVER_WAITS, THREAD_NEVER_WAITS, BLOCK_NEVER_WAITS, WRITES_TOO_EARLY = range(15, 19)
READS_TOO_EARLY, COPIES_TOO_EARLY, READS_THE_FIRST_TOO_EARLY = range(19, 22)
# enum LetsNext in kernels.cu
NEVER, BEFORE_IT_WAITS, AFTER_IT_HAS_WAITED = range(3)


def floats(*shape: int) -> Tensor:
    return poisoned(*shape, dtype=torch.float32, device="cpu")


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
def test_writes_context_the_shared_memory_are_found(emulator: Emulator, place: int) -> None:
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


# --- copies ---------------------------------------------------------------------------------------


def ring_is_right(emulator: Emulator, bug: int, seed: int) -> bool:
    tiles = randn(11, 64, dtype=torch.float32, device="cpu")
    out = floats(64)
    emulator.launch("ring", out, tiles, len(tiles), bug, seed=seed)
    return torch.allclose(out, tiles.sum(0), atol=1e-5)


def turns_are_right(emulator: Emulator, bug: int, seed: int) -> bool:
    tiles = randn(40, 64, dtype=torch.float32, device="cpu")
    out = floats(THREADS)
    emulator.launch("turns", out, tiles, len(tiles), bug, seed=seed)
    return torch.allclose(out, tiles.sum(0).repeat(2), atol=1e-4)


def test_a_ring_of_tensor_copies(emulator: Emulator) -> None:
    assert all(ring_is_right(emulator, NO_BUG, seed) for seed in SEEDS)
    assert all(turns_are_right(emulator, NO_BUG, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            MISSING_ARRIVAL,
            r"no thread can go on:(.|\n)*at wait_barrier .*: phase 0 lacks 64 of 64 arrivals and 0 "
            r"bytes",
        ),
        (
            MISSING_FENCE,
            r"tensor_copy .*: its barrier was initialized, but fence_barriers\(\) has not been "
            r"called",
        ),
        (
            TOO_MANY_BYTES,
            r"no thread can go on:(.|\n)*at wait_barrier .*: phase 0 lacks 0 of 1 arrivals and 16 "
            r"bytes",
        ),
        (
            NEVER_AWAITED,
            r"block 0 has ended, but copies into its shared memory were still under way",
        ),
        (UNINITIALIZED, r"finds no initialized barrier there"),
    ],
)
def test_a_ring_that_is_run_wrongly_is_an_error(emulator: Emulator, bug: int, message: str) -> None:
    for failure in emulator.failures("ring", floats(64), torch.zeros(11, 64), 11, bug):
        assert re.search(message, failure), failure


def test_an_arrival_too_many_is_an_error(emulator: Emulator) -> None:
    """It opens a stage too early, or meets a phase that is complete, whichever the order brings
    about.
    """
    assert all(emulator.failures("ring", floats(64), torch.zeros(11, 64), 11, TOO_MANY_ARRIVALS))


@pytest.mark.parametrize("bug", [USE_BEFORE_LANDING, OVERWRITE_IN_USE])
def test_a_ring_without_a_wait_gives_wrong_results(emulator: Emulator, bug: int) -> None:
    def is_found(seed: int) -> bool:
        try:
            return not ring_is_right(emulator, bug, seed)
        except EmulatorError:
            return True

    assert all(is_found(seed) for seed in SEEDS)


def test_readers_of_a_ring_run_apart(emulator: Emulator) -> None:
    """In some order: what one warp requests overwrites what another has still to read, though
    copies land only when awaited.
    """

    def is_found(seed: int) -> bool:
        try:
            return not turns_are_right(emulator, OVERWRITE_IN_USE, seed)
        except EmulatorError:
            return True

    assert any(is_found(seed) for seed in SEEDS)


BOX_FLOATS = 4096  # of shared memory, as box and half_tile show it


class Box(NamedTuple):
    """A box of float32, from the innermost dimension on, and where it begins."""

    size: tuple[int, int, int]
    place: tuple[int, int, int] = (0, 0, 0)
    swizzled: bool = False
    shift: int = 0  # bytes from the start of shared memory


def launch_box(emulator: Emulator, x: Tensor, box: Box, bug: int = NO_BUG, seed: int = 0) -> Tensor:
    """What shared memory holds after a copy out of x [blocks, rows, columns]."""
    out = torch.zeros(BOX_FLOATS)
    strides = [4 * x.stride(1), 4 * x.stride(0)]
    numbers = torch.tensor(
        [*x.shape[::-1], *strides, *box.size, *box.place, int(box.swizzled)], dtype=torch.int64
    )
    emulator.launch("box", out, x, numbers, box.shift, bug, seed=seed)
    return out


def cut_out(x: Tensor, box: Box) -> Tensor:
    """The box of x, zeros where it reaches past x."""
    result = x
    for dimension, (first, count) in enumerate(zip(box.place[::-1], box.size[::-1], strict=True)):
        places = torch.arange(first, first + count)
        inside = (places >= 0) & (places < x.shape[dimension])
        chosen = result.index_select(dimension, places.clamp(0, x.shape[dimension] - 1))
        result = torch.where(
            inside.view([-1 if d == dimension else 1 for d in range(3)]), chosen, 0.0
        )
    return result


def swizzled(x: Tensor) -> Tensor:
    """Tokens of 128 bytes whose 16-byte vector v lies at v ^ (token % 8)."""
    num_tokens = x.reshape(-1, 8, 16 // x.element_size())
    places = torch.arange(8) ^ torch.arange(len(num_tokens))[:, None] % 8
    return num_tokens.gather(1, places[..., None].expand_as(num_tokens))


def assert_shown(shown: Tensor, box: Tensor, shift: int = 0) -> None:
    """The box lies `shift` bytes from the start of shared memory, and NaNs around it."""
    first, last = shift // box.element_size(), shift // box.element_size() + box.numel()
    assert torch.equal(shown[first:last], box.flatten())
    assert shown[:first].isnan().all()
    assert shown[last:].isnan().all()


BOXES = [
    Box((64, 8, 2)),
    Box((4, 1, 1), (2, 1, 1)),
    Box((20, 3, 2), (1, 2, 1), shift=128),
    Box((20, 3, 2), (55, 4, 1)),  # zeros at three ends
    Box((8, 7, 4), (-3, -1, -2)),
    Box((4, 2, 2), (64, 0, 0)),  # nothing but zeros
    Box((4, 2, 2), (0, 5, 2**31 - 2)),
    Box((4, 2, 2), (-(2**31), 0, 0)),
    Box((32, 5, 3), swizzled=True),
    Box((32, 8, 2), (25, 3, 1), swizzled=True, shift=1024),
    Box((32, 16, 8), (-9, -4, -1), swizzled=True),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_tensor_copy_brings_a_box(emulator: Emulator, box: Box) -> None:
    """Of a tensor whose rows and blocks are farther apart than they are long."""
    x = in_wider_tokens(randn(3, 6 * 68, dtype=torch.float32, device="cpu"), 24).unflatten(
        1, (6, 68)
    )[:, :, :64]
    expected = cut_out(x, box)
    for seed in SEEDS:
        assert_shown(
            launch_box(emulator, x, box, seed=seed),
            swizzled(expected) if box.swizzled else expected,
            box.shift,
        )


def test_a_tensor_copy_lands_when_it_is_awaited(emulator: Emulator) -> None:
    for seed in SEEDS:
        is_nan = launch_box(
            emulator, torch.ones(1, 8, 64), Box((64, 8, 1)), USE_BEFORE_LANDING, seed
        ).isnan()
        assert is_nan.all() if seed == 0 else is_nan[:512].any()


@pytest.mark.parametrize(
    ("box", "bug", "message"),
    [
        (
            Box((64, 8, 1)),
            NEVER_AWAITED,
            r"copies into its shared memory were still under way: nobody waited for them",
        ),
        (
            Box((64, 8, 1)),
            UNINITIALIZED,
            r"tensor_copy .*: what is at .* is not the map of a tensor of three dimensions",
        ),
        (
            Box((64, 8, 1), shift=64),
            NO_BUG,
            r"tensor_copy .*: address .* is not aligned to 128 bytes",
        ),
        (
            Box((32, 8, 1), swizzled=True, shift=128),
            NO_BUG,
            r"tensor_copy .*: address .* is not aligned to 1024 bytes",
        ),
        (
            Box((64, 64, 1), shift=128),
            NO_BUG,
            r"tensor_copy .*: 16384 bytes at .* are not in the block's shared memory",
        ),
    ],
    ids=str,
)
def test_a_wrong_tensor_copy_is_an_error(
    emulator: Emulator, box: Box, bug: int, message: str
) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message):
            launch_box(emulator, torch.ones(1, 8, 64), box, bug, seed)


@pytest.mark.parametrize(
    ("shape", "first", "box", "message"),
    [
        ((2, 6, 64), 1, Box((64, 8, 1)), "invalid argument"),  # an address that is not aligned
        ((2, 6, 66), 0, Box((64, 8, 1)), "invalid argument"),  # strides
        ((2, 6, 64), 0, Box((6, 8, 1)), "invalid argument"),
        ((2, 6, 64), 0, Box((64, 0, 1)), "invalid argument"),
        ((2, 6, 64), 0, Box((4, 257, 1)), "invalid argument"),
        ((2, 0, 64), 0, Box((64, 8, 1)), "invalid argument"),
        ((2, 6, 64), 0, Box((36, 8, 1), swizzled=True), "invalid argument"),
        ((2, 6, 64), 0, Box((16, 8, 1), swizzled=True), "operation not supported"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(
    emulator: Emulator, shape: tuple[int, ...], first: int, box: Box, message: str
) -> None:
    x = torch.ones(BOX_FLOATS)[first:].as_strided(shape, (shape[1] * shape[2], shape[2], 1))
    with pytest.raises(EmulatorError, match=f"^{message}$"):
        launch_box(emulator, x, box)


@pytest.mark.parametrize(
    ("rows", "k", "row", "block"), [(24, 512, 8, 0), (21, 576, 16, 8), (3, 64, 0, 0)]
)
def test_a_half_tile_of_a_weight(
    emulator: Emulator, rows: int, k: int, row: int, block: int
) -> None:
    """As half_tile_map.cuh has it: by blocks of 64 columns, swizzled, and zeros outside of the
    weight.
    """
    weight = in_wider_tokens(randn(rows, k, dtype=torch.bfloat16, device="cpu"), 16)
    out = torch.zeros(2 * BOX_FLOATS, dtype=torch.bfloat16)
    emulator.launch("half_tile", out, weight, rows, k, weight.stride(0), row, block)
    half_tile = torch.zeros(8, 512, dtype=torch.bfloat16)
    part = weight[row : row + 8, 64 * block : 64 * block + 512]
    half_tile[: part.shape[0], : part.shape[1]] = part
    assert_shown(out, swizzled(half_tile.unflatten(1, (8, 64)).transpose(0, 1)), shift=1024)


@pytest.mark.parametrize(("tiles", "valid"), [(1, 1), (6, 6), (7, 4)])
def test_groups_of_asynchronous_copies(emulator: Emulator, tiles: int, valid: int) -> None:
    values = randn(tiles, 128, dtype=torch.float32, device="cpu")
    for seed in SEEDS:
        out = floats(128)
        emulator.launch("async", out, values, tiles, valid, NO_BUG, seed=seed)
        assert torch.allclose(out, values[:valid].sum(0), atol=1e-5)


@pytest.mark.parametrize("bug", [USE_BEFORE_LANDING, MISSING_BARRIER])
def test_asynchronous_copies_used_too_early(emulator: Emulator, bug: int) -> None:
    for seed in SEEDS:
        out = torch.zeros(128)
        emulator.launch("async", out, torch.ones(6, 128), 6, 6, bug, seed=seed)
        assert out.isnan().any()


# --- matrices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [0, 1, 2], ids=["by hand", "load_matrices", "load_matrices_transposed"]
)
def test_multiply(emulator: Emulator, way: int) -> None:
    """A wrong place of any element would be seen: all are random."""
    for seed in SEEDS:
        a, b = (randn(16, n, dtype=torch.bfloat16, device="cpu", seed=seed + n) for n in (16, 8))
        d = randn(16, 8, dtype=torch.float32, device="cpu", seed=seed)
        exact = d.double() + a.double() @ b.double()
        emulator.launch("matrix", d, a, b, way, seed=seed)
        assert torch.equal(d, exact.float())


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


# --- launches and types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bug", "thread"),
    [
        (NEVER_WAITS, r"\d+ of block [012]"),
        (THREAD_NEVER_WAITS, "5 of block 0"),
        (BLOCK_NEVER_WAITS, r"\d+ of block 1"),
    ],
)
def test_every_thread_of_a_kernel_that_starts_early_has_to_wait(
    emulator: Emulator, bug: int, thread: str
) -> None:
    out = ints([0] * (3 * THREADS), "cpu")
    emulator.launch("pdl", out, 3, NO_BUG)
    assert (out == 1).all()
    for failure in emulator.failures("pdl", out, 3, bug):
        assert re.search(
            rf"\(int\*, int\) failed, .*: thread {thread} has ended without having called "
            r"wait_for_earlier\(\)",
            failure,
        ), failure


def test_writing_before_the_wait_is_an_error(emulator: Emulator) -> None:
    for failure in emulator.failures("pdl", ints([0] * THREADS, "cpu"), 1, WRITES_TOO_EARLY):
        assert re.search(
            r"thread \d+ of block 0 writes 4 bytes of global memory at \w+ before it has called "
            r"wait_for_earlier\(\)",
            failure,
        ), failure


def chain_failures(emulator: Emulator, lets_next: int, bug: int) -> list[str]:
    """What three kernels failed with, of which the last two may start early; "" where their sum
    is right.
    """
    out, second, first = (ints([0] * THREADS, "cpu") for _ in range(3))
    constant = ints([7] * THREADS, "cpu")
    failures = emulator.failures("chain", out, second, first, constant, lets_next, bug)
    if not any(failures):
        assert torch.equal(out, 2 * torch.arange(THREADS, dtype=torch.int32) + 8)
    return failures


@pytest.mark.parametrize(
    ("lets_next", "bug"),
    [
        (BEFORE_IT_WAITS, NO_BUG),
        # nobody runs any more when the third starts
        (NEVER, READS_TOO_EARLY),
        (NEVER, COPIES_TOO_EARLY),
        # the first has ended when the second lets the third start
        (AFTER_IT_HAS_WAITED, READS_THE_FIRST_TOO_EARLY),
        (AFTER_IT_HAS_WAITED, NO_BUG),
    ],
)
def test_reading_before_the_wait_what_no_kernel_that_runs_may_write(
    emulator: Emulator, lets_next: int, bug: int
) -> None:
    assert not any(chain_failures(emulator, lets_next, bug))


@pytest.mark.parametrize(
    ("lets_next", "bug", "writer"),
    [
        (BEFORE_IT_WAITS, READS_TOO_EARLY, "int*, const int*, int"),
        (AFTER_IT_HAS_WAITED, READS_TOO_EARLY, "int*, const int*, int"),
        (BEFORE_IT_WAITS, COPIES_TOO_EARLY, "int*, const int*, int"),
        # the second lets the third start while the first may run
        (BEFORE_IT_WAITS, READS_THE_FIRST_TOO_EARLY, "int*"),
    ],
)
def test_reading_before_the_wait_what_a_kernel_may_still_write_is_an_error(
    emulator: Emulator, lets_next: int, bug: int, writer: str
) -> None:
    """Though the launches run one after another, so that the values are right."""
    for failure in chain_failures(emulator, lets_next, bug):
        assert re.search(
            r"thread \d+ of block 0 reads (4|16) bytes of global memory at \w+ before it has "
            r"called wait_for_earlier\(\), which a kernel writes that may still run: "
            rf"\({re.escape(writer)}\)$",
            failure,
        ), failure


@pytest.mark.parametrize(
    ("blocks", "threads", "shared_bytes", "cluster", "message"),
    [
        (1, 1025, 0, 1, "invalid configuration argument"),
        (1, 0, 0, 1, "invalid configuration argument"),
        (0, 32, 0, 1, "invalid configuration argument"),
        (2**31, 32, 0, 1, "invalid configuration argument"),
        (6, 32, 0, 4, "invalid configuration argument"),
        (16, 32, 0, 16, "invalid configuration argument"),
        (1, 32, 227 * 1024 + 1, 1, "invalid argument"),
    ],
)
def test_launches_that_a_device_refuses(
    emulator: Emulator, blocks: int, threads: int, shared_bytes: int, cluster: int, message: str
) -> None:
    with pytest.raises(EmulatorError, match=message):
        emulator.launch("fill", ints([0] * 64, "cpu"), blocks, threads, shared_bytes, cluster)


def test_blocks_of_any_size_run_all_their_threads(emulator: Emulator) -> None:
    for threads in (1, 31, 33, 1000, 1024):
        for seed in SEEDS:
            out = ints([[-1] * threads] * 5, "cpu")
            emulator.launch("fill", out, 5, threads, 227 * 1024, 1, seed=seed)
            assert torch.equal(out, torch.arange(5, dtype=torch.int32)[:, None].expand(5, threads))


def test_the_device_is_small_and_settable(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sms, major, minor = 16, 75, 76  # cudaDeviceAttr
    assert [emulator.attribute(which) for which in (sms, major, minor)] == [4, 9, 0]
    monkeypatch.setenv("PHOTON_EMULATOR_SMS", "7")
    monkeypatch.setenv("PHOTON_EMULATOR_COMPUTE_CAPABILITY", "8.6")
    assert [emulator.attribute(which) for which in (sms, major, minor)] == [7, 8, 6]


def test_conversions_round_to_nearest_even(emulator: Emulator) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64)
    halfway = (torch.arange(65536) << 16 | 0x8000) - 2**31  # of two bf16
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    of_halves = torch.cat(
        [torch.nextafter(halves, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    )
    between = (halves[:-1] + halves[1:]) / 2
    values = torch.cat(
        [
            patterns.to(torch.int32).view(torch.float32),
            halfway.to(torch.int32).view(torch.float32),
            halves,
            of_halves,
            between,
        ]
    )
    bf16, f16 = floats(len(values)), floats(len(values))
    emulator.launch("convert", values, bf16, f16, len(values))
    assert torch.equal(bf16.nan_to_num(nan=7e30), values.bfloat16().float().nan_to_num(nan=7e30))
    assert torch.equal(f16.nan_to_num(nan=7e30), values.half().float().nan_to_num(nan=7e30))
    assert struct.pack("<f", bf16[values.isnan()][0].item()) == b"\x00\x00\xff\x7f"


def test_it_has_every_function_of_ptx(emulated: Path) -> None:
    def names(path: str) -> set[str]:
        return set(re.findall(r"inline \w[\w ]*?[\w*&]+ (\w+)\(", (ROOT / path).read_text()))

    real, standing_in = names("csrc/cuda/ptx.cuh"), names("tests/emulator/include/cuda/ptx.cuh")
    assert {"wait_barrier", "multiply_bf16", "dynamic_shared"} <= real
    assert real - {"shared_address"} == standing_in
