"""Stamps inside kernels: absent unless the build asks for them, in order where it does, and what
the tool makes of them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchmarks.common.models import TINY
from benchmarks.common.result import BenchmarkError
from benchmarks.lab import stamps as lab
from benchmarks.lab.step import LabStep
from photon_ext._library import OPS_FILE, hopper_runs
from photon_ext.models.weights import random_weights

# the smallest whose attention is the Hopper kernels'
WIDER = replace(TINY, head_dim=64, intermediate=128)
IS_STAMPED = hasattr(ctypes.CDLL(str(OPS_FILE)), "photon_ext_linears_stamps")


def stamp(kernel: str, begin: int, columns: int = 64, sm: int = 0, **changed: int) -> lab.Stamp:
    """A CTA that takes 2, 1, 4 and 3 us from point to point, at 2 clocks a nanosecond."""
    clocks = [2 * (begin + us * 1000) for us in (0, 2, 3, 7, 10)]
    rows = changed.get("rows", 96)
    return lab.Stamp(kernel, rows, columns, 0, sm, begin, tuple(clocks))


def test_a_build_has_stamps_only_if_asked_for(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = sorted(setup_py.ROOT.glob("csrc/cuda/*/*.cu"))
    rules = {}
    for wish in ("0", "1"):
        monkeypatch.setenv("PHOTON_STAMPS", wish)
        plan = setup_py.Plan(None, "g++")
        for source in sources:
            plan.compile_cuda(source.relative_to(setup_py.ROOT))
        rules[wish] = plan.lines
    assert not any("stamps" in line.lower() for line in rules["0"])
    assert sum("-DPHOTON_STAMPS" in line for line in rules["1"]) == len(setup_py.STAMPED)


def test_the_sources_with_stamps_are_those_that_setup_compiles_for_them(
    setup_py: ModuleType,
) -> None:
    sources = setup_py.ROOT.glob("csrc/cuda/*/*.cu")
    taken = {path.stem for path in sources if "PHOTON_TAKE_STAMPS(" in path.read_text()}
    assert taken == set(setup_py.STAMPED)


@pytest.mark.skipif(IS_STAMPED, reason="a build with stamps")
def test_a_plain_build_has_no_function_that_takes_stamps() -> None:
    with pytest.raises(BenchmarkError, match=r"has no stamps: build it with PHOTON_STAMPS=1"):
        lab.takers(str(OPS_FILE))
    assert b"stamp_records" not in OPS_FILE.read_bytes()


def test_stretches_are_told_by_use_and_in_microseconds() -> None:
    all_stamps = [
        *(stamp("norm_linear", begin) for begin in (1000, 2000, 90_000)),
        stamp("norm_linear", 5000, rows=TINY.vocab),
        stamp("linear_residual", 3000, columns=TINY.q_size),
        stamp("linear_residual", 4000, columns=TINY.intermediate),
    ]
    idle = all_stamps[0]._replace(clocks=(*all_stamps[0].clocks[:1], 0, 0, 0, 0))
    lines = {line["use"]: line for line in lab.summary([*all_stamps, idle], TINY)}
    assert list(lines) == ["qkv", "o", "down", "head"]
    assert lines["qkv"]["ctas"] == 3
    assert lines["qkv"]["early"] == [2.0, 2.0]
    assert lines["head"]["late"] == [8.0, 8.0]
    assert [lines["o"][name][0] for name in lab.STRETCHES] == [2.0, 1.0, 4.0, 3.0]


def test_a_record_is_as_the_kernels_write_it() -> None:
    words = (3, 16, 128, 5, 77, 0, 1 << 40, 1, 2, 3, 4, 5)
    found = lab.Stamp.of(lab.RECORD.unpack(lab.RECORD.pack(*words)))
    assert found == lab.Stamp("attention", 16, 128, 5, 77, 1 << 40, (1, 2, 3, 4, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_STAMPED, reason="a build without stamps")
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_all_ctas_of_a_step_stamp_their_points_in_order(batch: int) -> None:
    if not hopper_runs():
        pytest.skip("only the Hopper kernels have stamps")
    weights = random_weights(WIDER, torch.bfloat16, torch.device("cuda"))
    step = LabStep(WIDER, weights, batch, context=100)
    torch.cuda.synchronize()
    lab.take_stamps(str(OPS_FILE))
    step.reset()
    step.run()
    found = lab.take_stamps(str(OPS_FILE))
    assert {each.kernel for each in found} == set(lab.KERNELS)
    working = [each for each in found if each.has_work]
    assert {lab.use_of(each, WIDER) for each in working} == {
        "qkv",
        "attention",
        "o",
        "gate_up",
        "down",
        "head",
    }
    assert all(list(each.clocks) == sorted(each.clocks) for each in working)
    assert lab.take_stamps(str(OPS_FILE)) == []
