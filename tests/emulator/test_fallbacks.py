"""Which devices run the Hopper kernels, and what is said where one was asked for and a portable one
ran: in processes of their own on the emulated kernels, because device and library are chosen there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emulator.test_ops import run

# An op of each family with hopper=True, then odd widths, then all of it again.
SCRIPT = """
import json, logging, torch
from photon_ext import hopper_runs, ops
from photon_ext.cli import info
from photon_ext._library import fallbacks, log_fallbacks

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("photon_ext").addHandler(handler)
logging.getLogger("photon_ext").propagate = False

def linears(k, dtype=torch.bfloat16):
    x, weight, residual = (torch.ones(*s, dtype=dtype) for s in ((2, k), (16, k), (2, 16)))
    ops.norm_linear(x, torch.ones(k, dtype=dtype), 1e-5, weight, hopper=True)
    ops.norm_swiglu(x, torch.ones(k, dtype=dtype), 1e-5, weight, hopper=True)
    ops.linear_residual_(residual, x, weight, hopper=True)

def sample():
    state = torch.zeros(2, ROW_COLUMNS, dtype=torch.int32)
    ops.sample(torch.ones(1, 8), torch.zeros(1, 4, dtype=torch.int32), state, hopper=True)

from photon_ext.layout import ROW_COLUMNS
linears(64)
sample()
report = {"runs": hopper_runs(), "right": fallbacks()}
log_fallbacks()
for _ in range(2):
    linears(72)
    linears(16448)
    linears(64, torch.float16)
log_fallbacks()
log_fallbacks()
report |= {"all": fallbacks(), "logged": records, "info": info.describe()}
print(json.dumps(report))
"""
NO_MULTIPLE = "the number of columns is no multiple of 64"
TOO_WIDE = "there are more than 16384 columns to normalize"
NO_BFLOAT16 = "the dtype is not bfloat16"
OPS = {"norm_linear_into", "norm_swiglu_into", "linear_residual_", "sample_into"}


def reported(emulated: Path, **environment: str) -> dict[str, object]:
    done = run(emulated / "_ops.abi3.so", SCRIPT, **environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_a_fallback_names_itself_once_for_each_op_and_reason(emulated: Path) -> None:
    report = reported(emulated)
    assert report["runs"] is True
    assert report["right"] == {}
    reasons = f"{NO_MULTIPLE}; {TOO_WIDE}; {NO_BFLOAT16}"
    assert report["all"] == {
        "norm_linear_into": reasons,
        "norm_swiglu_into": reasons,
        "linear_residual_": f"{NO_MULTIPLE}; {NO_BFLOAT16}",  # which takes wide inputs
    }
    logged = report["logged"]
    assert isinstance(logged, list)
    assert sorted(logged) == sorted(
        f"{op} runs its portable kernel instead of the Hopper one: {reason}"
        for op, reason in [
            ("norm_linear_into", NO_MULTIPLE),
            ("norm_swiglu_into", NO_MULTIPLE),
            ("linear_residual_", NO_MULTIPLE),
            ("norm_linear_into", TOO_WIDE),
            ("norm_swiglu_into", TOO_WIDE),
            ("norm_linear_into", NO_BFLOAT16),
            ("norm_swiglu_into", NO_BFLOAT16),
            ("linear_residual_", NO_BFLOAT16),
        ]
    )
    assert (
        f"cuda: linear_residual_ ran its portable kernel instead of the Hopper one: {NO_MULTIPLE}"
        in str(report["info"])
    )


@pytest.mark.parametrize(
    ("capability", "allowed", "reason"),
    [
        ("8.0", "1", "the device's compute capability is not 9.0"),
        ("10.3", "1", "the device's compute capability is not 9.0"),
        (
            "10.0",
            "",
            "the device's compute capability is 10.0, where the Hopper kernels are untested; "
            "PHOTON_HOPPER_ON_10=1 allows them in a build with PHOTON_SM_100=1",
        ),
        ("10.0", "1", None),
    ],
)
def test_which_devices_run_the_hopper_kernels(
    emulated: Path, capability: str, allowed: str, reason: str | None
) -> None:
    report = reported(
        emulated,
        PHOTON_EMULATOR_COMPUTE_CAPABILITY=capability,
        PHOTON_HOPPER_ON_10=allowed,
    )
    assert report["runs"] is (reason is None)
    assert report["right"] == ({} if reason is None else dict.fromkeys(OPS, reason))
