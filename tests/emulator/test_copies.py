"""Asynchronous copies of the emulator, and matrix instructions, which use what they bring: what is
right gives the right result in every order of threads, and planted bugs are found.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.emulator.conftest import SEEDS, Emulator, EmulatorError
from tests.emulator.planted import (
    MISSING_ARRIVAL,
    MISSING_BARRIER,
    MISSING_FENCE,
    NEVER_AWAITED,
    NO_BUG,
    OVERWRITE_IN_USE,
    THREADS,
    TOO_MANY_ARRIVALS,
    TOO_MANY_BYTES,
    UNINITIALIZED,
    USE_BEFORE_LANDING,
    floats,
)
from tests.ops.numeric import in_wider_tokens, randn

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


BOX_FLOATS = 4096  # of shared memory, as box and row_tile show it


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
def test_a_row_tile_of_a_weight(
    emulator: Emulator, rows: int, k: int, row: int, block: int
) -> None:
    """As row_tile_map.cuh has it: by blocks of 64 columns, swizzled, and zeros outside of the
    weight.
    """
    weight = in_wider_tokens(randn(rows, k, dtype=torch.bfloat16, device="cpu"), 16)
    out = torch.zeros(2 * BOX_FLOATS, dtype=torch.bfloat16)
    emulator.launch("row_tile", out, weight, rows, k, weight.stride(0), row, block)
    row_tile = torch.zeros(8, 512, dtype=torch.bfloat16)
    part = weight[row : row + 8, 64 * block : 64 * block + 512]
    row_tile[: part.shape[0], : part.shape[1]] = part
    assert_shown(out, swizzled(row_tile.unflatten(1, (8, 64)).transpose(0, 1)), shift=1024)


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_multiply(emulator: Emulator, dtype: torch.dtype, way: int) -> None:
    """A wrong place of any element would be seen: all are random."""
    for seed in SEEDS:
        a, b = (randn(16, n, dtype=dtype, device="cpu", seed=seed + n) for n in (16, 8))
        d = randn(16, 8, dtype=torch.float32, device="cpu", seed=seed)
        exact = d.double() + a.double() @ b.double()
        emulator.launch("matrix", d, a, b, way, int(dtype == torch.float16), seed=seed)
        assert torch.equal(d, exact.float())


def test_codes_of_e4m3_become_float16(emulator: Emulator) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    halves = torch.zeros(256, dtype=torch.float16)
    emulator.launch("e4m3", halves, codes, 64)
    expected = codes.view(torch.float8_e4m3fn).half()
    assert torch.equal(halves.nan_to_num(7), expected.nan_to_num(7))
