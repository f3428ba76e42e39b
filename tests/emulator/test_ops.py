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
    "even_attention",
    "mixed_attention",
    "split_attention",
)
OTHERS = (
    "batch_linear",
    "embedding",
    "fused_linear",
    "linear",
    "lora",
    "lora_link",
    "mlp",
    "norm",
    "sample",
    "step",
)

PYTEST = ("-m", "pytest", "-q", "-x", "--few", "-p", "no:cacheprovider", "-m", "not gpu")


def run(library: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, on the kernels of this library."""
    return run_script(script, PHOTON_OPS_LIBRARY=str(library), **environment)


def run_tests(library: Path, *arguments: str, **environment: str) -> CompletedTests:
    variables = {**os.environ, "PHOTON_OPS_LIBRARY": str(library), **environment}
    command = ["nice", "-n", "10", sys.executable, *PYTEST, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


# What runs beside the other tests: files, choice of tests, and, besides a random order, variables;
# of each test few cases that hold every value. `make test-emulated` runs all the others of these
# ops, but of "compute capability 8.0" and "six sms", and more of the models.
RUNS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "attentions": (
        tuple(f"ops/test_{family}" for family in ATTENTIONS),
        "not (in_one_run and (256 or 96 or 24-2-128 or 8-4-128 or 10-2-64)) and "
        "not (however_many_blocks and (256 or 96 or 24-2-128 or 8-4-128 or 12-1-64)) and "
        "not (more_tokens_than_lanes and (not 6-2-64 or nearly or some or apart or one)) and "
        "not (many_tokens_are_near and (wide or rows or heads)) and "
        "not (a_batch_is_near and (wide or rows or long-2))",
        {},
    ),
    "other ops": (
        tuple(f"ops/test_{family}" for family in OTHERS),
        "(not test_fused_linear or counts or strided or as_near or more_columns) and not "
        "(around_the_groups and (264-576 or 80-1088 or 120-1088 or 320-64)) and not "
        "(many_tokens_at and 40-1088) and not (more_columns_than_a_norm and 17408) and not "
        "(outputs_of_many_columns and 16384) and not "
        "(test_batch_linear and (264-576 or 130 or portable or (whatever_others and 3200))) and "
        "not draws_from_the_softmax",
        {},
    ),
    "chunks": (
        ("ops/test_chunk_attention", "models/test_decoder_fast"),
        "(test_chunk_attention and not ((in_parts or rides_along or stay_whole or fills) and "
        "(96 or 128 or 256)) and not (rides_along and all) and "
        "not (of_every_layout and (96 or 128))) or (as_near and tied) or in_a_mixed_step",
        {},
    ),
    # Two passes of an exchange, by one cluster.
    "six sms": (
        ("ops/test_fused_linear",),
        "not_finite or (around_the_groups and 120-1088)",
        {"PHOTON_EMULATOR_SMS": "6"},
    ),
    # No cluster and no early launch is allowed there.
    "compute capability 8.0": (
        ("ops/test_step", "ops/test_embedding", "ops/test_sample", "models/test_decoder_fast"),
        "(not test_decoder_fast or steps_repeat) and not draws_from_the_softmax",
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
                *(f"tests/{file}.py" for file in files),
                "-k",
                chosen,
                **{"PHOTON_EMULATOR_SEED": "1", **variables},
            )
            for name, (files, chosen, variables) in RUNS.items()
        }


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
