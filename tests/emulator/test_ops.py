"""The tests of the ops once more, on the CUDA kernels: in a process of their own, because an ops library is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import photon_ext
from tests.conftest import ROOT

FAMILIES = (
    "attention",
    "chunk_attention",
    "embedding",
    "fused_linear",
    "linear",
    "mlp",
    "norm",
    "sample",
    "split_attention",
    "step",
)

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu")


def run(library: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PHOTON_OPS_LIBRARY": str(library), **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True)


def test_the_cuda_kernels_pass_the_tests_of_the_ops_in_a_random_order(emulated: Path) -> None:
    """make test-emulated runs more of the fused linears, which have many cases, and more of models."""
    files = [*(f"tests/ops/test_{family}.py" for family in FAMILIES), "tests/models/test_decoder_fast.py"]
    chosen = "not (test_fused_linear or test_decoder_fast) or extent or strided or as_near"
    done = run(emulated / "_ops.abi3.so", *PYTEST, *files, "-k", chosen, PHOTON_EMULATOR_SEED="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) > 500


def test_fused_linears_on_six_multiprocessors(emulated: Path) -> None:
    """Two passes of an exchange, by one cluster. `make test-emulated` has other numbers."""
    chosen = "(any_number and 1088) or not_finite or (around_the_groups and 1088)"
    variables = {"PHOTON_EMULATOR_SEED": "1", "PHOTON_EMULATOR_MULTIPROCESSORS": "6"}
    done = run(emulated / "_ops.abi3.so", *PYTEST, "tests/ops/test_fused_linear.py", "-k", chosen, **variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_library_that_is_asked_for_is_loaded(emulated: Path) -> None:
    code = "import photon_ext; from photon_ext._library import _ops_library as o; o.photon_emulator_set_seed; print(photon_ext.cpu_isa())"
    assert run(emulated / "_ops.abi3.so", "-c", code).stdout.split() == [photon_ext.cpu_isa()]
    usual = Path(photon_ext.__file__).with_name("_ops.abi3.so")
    assert "photon_emulator_set_seed" in run(usual, "-c", code).stderr


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "none.so", "-c", "import photon_ext")
    assert f"ImportError: PHOTON_OPS_LIBRARY is '{tmp_path}/none.so', and there is no such file" in done.stderr
