"""Launches of the emulator, chains of kernels, and its types: what is right gives the right result,
and planted bugs are found.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.emulator.conftest import SEEDS, Emulator, EmulatorError
from tests.emulator.planted import (
    AFTER_IT_HAS_WAITED,
    BEFORE_IT_WAITS,
    BLOCK_NEVER_WAITS,
    COPIES_TOO_EARLY,
    NEVER,
    NEVER_WAITS,
    NO_BUG,
    READS_THE_FIRST_TOO_EARLY,
    READS_TOO_EARLY,
    THREAD_NEVER_WAITS,
    THREADS,
    WRITES_TOO_EARLY,
    floats,
)
from tests.ops.numeric import ints

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
