"""The tests of the ops once more, on the CUDA kernels: in a process of their own, because an ops
library is chosen at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

import photon_ext
from tests.conftest import ROOT
from tests.forked import run_script

CompletedTests: TypeAlias = "subprocess.CompletedProcess[str]"

ATTENTIONS = (
    "attention",
    "batch_attention",
    "balanced_attention",
    "chunk_plan",
    "exact_attention",
    "mixed_attention",
    "split_attention",
)
OTHERS = (
    "batch_fp8",
    "batch_linear",
    "batch_stored",
    "embedding",
    "fused_linear",
    "linear",
    "lora",
    "lora_link",
    "mlp",
    "narrow_stored",
    "norm",
    "sample",
    "step",
    "stored_linear",
)

PYTEST = ("-m", "pytest", "-q", "-x", "--few", "-p", "no:cacheprovider")


def run(library: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, on the kernels of this library."""
    return run_script(script, PHOTON_OPS_LIBRARY=str(library), **environment)


def run_tests(library: Path, *arguments: str, **environment: str) -> CompletedTests:
    variables = {**os.environ, "PHOTON_OPS_LIBRARY": str(library), **environment}
    command = ["nice", "-n", "10", sys.executable, *PYTEST, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


# What runs beside the other tests: files or tests, which of their marks count, and, besides a
# random order, variables; of each test few cases that hold every value. What is marked
# emulated_later, and more of the models, is left to `make test-emulated`, which runs all the others
# of these ops, too, but of "compute capability 8.0" and "six sms".
NOT_LATER = "not emulated_later"
DECODER = "models/test_decoder_fast.py::test"
RUNS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "attentions": (tuple(f"ops/test_{family}.py" for family in ATTENTIONS), NOT_LATER, {}),
    "other ops": (tuple(f"ops/test_{family}.py" for family in OTHERS), NOT_LATER, {}),
    "chunks": (
        (
            "ops/test_chunk_attention.py",
            f"{DECODER}_as_near_to_float32_as_op_by_op",
            f"{DECODER}_a_token_has_the_same_bits_in_a_mixed_step",
        ),
        NOT_LATER,
        {},
    ),
    # Two passes of an exchange, by one cluster.
    "six sms": (("ops/test_fused_linear.py",), "six_sms", {"PHOTON_EMULATOR_SMS": "6"}),
    # No cluster and no early launch is allowed there.
    "compute capability 8.0": (
        (
            *("ops/test_step.py", "ops/test_embedding.py", "ops/test_sample.py"),
            f"{DECODER}_steps_repeat_to_the_bit",
        ),
        NOT_LATER,
        {"PHOTON_EMULATOR_COMPUTE_CAPABILITY": "8.0"},
    ),
}


@pytest.fixture(scope="session")
def runs(emulated: Path) -> Iterator[dict[str, Future[CompletedTests]]]:
    """Begun by the first test here that asks for it; those that ask for a result come last of
    all, see conftest.py.
    """
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(
                run_tests,
                emulated / "_ops.abi3.so",
                *(f"tests/{file}" for file in files),
                "-m",
                f"not gpu and ({marks})",
                **{"PHOTON_EMULATOR_SEED": "1", **variables},
            )
            for name, (files, marks, variables) in RUNS.items()
        }


@pytest.mark.slow("it waits for the emulated kernels, which run beside the other tests")
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("attentions", 150),
        ("other ops", 300),
        ("chunks", 80),
        ("six sms", 5),
        ("compute capability 8.0", 200),
    ],
)
def test_the_cuda_kernels_pass_the_tests_of_the_ops_in_a_random_order(
    runs: dict[str, Future[CompletedTests]], name: str, least: int
) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) > least


@pytest.mark.usefixtures("runs")
def test_the_library_that_is_asked_for_is_loaded(emulated: Path) -> None:
    code = (
        "import photon_ext; from photon_ext._library import _ops_library as o; "
        "o.photon_emulator_set_seed; print(photon_ext.cpu_isa())"
    )
    assert run(emulated / "_ops.abi3.so", code).stdout.split() == [photon_ext.cpu_isa()]
    usual = Path(photon_ext.__file__).with_name("_ops.abi3.so")
    assert "photon_emulator_set_seed" in run(usual, code).stderr


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "none.so", "import photon_ext")
    assert (
        f"ImportError: PHOTON_OPS_LIBRARY is '{tmp_path}/none.so', and there is no such file"
        in done.stderr
    )
