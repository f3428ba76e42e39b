"""What setup.py decides: which toolkit it builds with, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import Distribution
from setuptools.errors import SetupError

import photon_ext
from photon_ext import _C
from photon_ext._build_info import BUILD_INFO
from tests.test_portable_code import reached

ROOT = Path(photon_ext.__file__).resolve().parents[1]
TORCH_IN_TEXT = re.compile(r"^#include <torch/.*>$", re.MULTILINE)
CUDA_IN_TEXT = re.compile(r"PHOTON_WITH_CUDA|#include <cu")


@pytest.fixture
def build(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, with no wishes about CUDA, beside a torch that has it."""
    for name in ("PHOTON_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    return setup_py


def fake_nvcc(directory: Path, release: str) -> Path:
    """A wrapper that answers like nvcc, and points to a toolkit elsewhere."""
    script = directory / "bin" / "nvcc"
    script.parent.mkdir()
    version, dry_run = (
        f"echo 'release {release}, V{release}.1'",
        f"echo '#$ TOP={directory}/real/bin/..' >&2",
    )
    script.write_text(f"#!/bin/sh\ncase $1 in --version) {version};; *) {dry_run};; esac\n")
    script.chmod(0o755)
    return script


def test_without_nvcc_the_cpu_side_is_built_unless_cuda_is_asked_for(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build.find_cuda() is None
    monkeypatch.setenv("PHOTON_CUDA", "1")
    with pytest.raises(
        SetupError, match=r"PHOTON_CUDA=1, but nvcc is in none of .*: install the CUDA toolkit"
    ):
        build.find_cuda()


def test_a_wrapper_of_nvcc_is_seen_through(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "real" / "bin").mkdir(parents=True)
    assert build.find_cuda() == build.Cuda(str(nvcc), "13.0", tmp_path / "real")
    monkeypatch.setenv("PHOTON_CUDA", "0")
    assert build.find_cuda() is None


def test_a_torch_without_cuda_gets_no_kernels_unless_they_are_asked_for(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("torch.version.cuda", None)
    assert build.find_cuda() is None
    monkeypatch.setenv("PHOTON_CUDA", "1")
    assert build.find_cuda().nvcc == str(nvcc)


def test_an_old_nvcc_is_refused_in_words(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvcc(tmp_path, "12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(
        SetupError,
        match=r"is release 12\.4; 12\.8 or newer is needed: update it, or build with PHOTON_CUDA=0",
    ):
        build.find_cuda()


def test_a_wish_that_is_not_understood(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTON_CUDA", "yes")
    with pytest.raises(SetupError, match="PHOTON_CUDA='yes' is not understood"):
        build.find_cuda()


def test_a_missing_torch_is_explained(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        SetupError,
        match=r"cannot import torch .* pip install torch==2\.13\.0, .* --no-build-isolation",
    ):
        build.import_build_tools()


def test_every_source_is_in_the_table(build: ModuleType) -> None:
    named = {
        path
        for library in build.LIBRARIES
        for pattern in library.sources
        for path in ROOT.glob(pattern)
    }
    assert named == {path for suffix in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")}


def test_hazard_g2_a_source_has_code_for_all_gpus_that_run_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stems = {path.stem for path in ROOT.glob("csrc/cuda/*/*.cu")}
    assert {*build.HOPPER, *build.STAMPED} <= stems
    monkeypatch.delenv("PHOTON_SM_100", raising=False)
    fast, chunks = (Path(f"csrc/cuda/x/{name}.cu") for name in ("large_linear", "chunk_attention"))
    assert list(build.cuda_archs(fast)) == ["compute_90a"]
    assert list(build.cuda_archs(chunks)) == ["compute_80", "compute_90a"]
    assert build.built_codes() == ["sm_80", "compute_80", "sm_90a"]
    monkeypatch.setenv("PHOTON_SM_100", "1")
    assert list(build.cuda_archs(fast)) == ["compute_90a", "compute_100a"]
    assert list(build.cuda_archs(chunks)) == ["compute_80", "compute_90a", "compute_100a"]


UNSUPPORTED_ON_10 = """
#include <cstdio>
#include "cuda/launch.cuh"

cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor ? 10 : 0;
  return cudaSuccess;
}
int main() {
  const photon::Unsupported why = photon::hopper_unsupported(photon::cuda::current_gpu());
  std::puts(why ? why.reason : "runs");
}
"""


def test_a_build_without_code_for_10_says_so_there(build: ModuleType, tmp_path: Path) -> None:
    source, program = tmp_path / "unsupported.cpp", tmp_path / "unsupported"
    source.write_text(UNSUPPORTED_ON_10)
    said = {}
    for switch in ("-U", "-D"):
        flags = build.EMULATOR_FLAGS.replace("-DPHOTON_SM_100", "")
        command = f"g++ -O0 -std=c++17 -Icsrc {flags} {switch}PHOTON_SM_100 {source} -o {program}"
        subprocess.run(command.split(), cwd=ROOT, check=True)
        variables = os.environ | {"PHOTON_HOPPER_ON_10": "1"}
        done = subprocess.run([program], env=variables, capture_output=True, text=True)
        said[switch] = done.stdout.strip()
    assert said == {
        "-U": "the device's compute capability is 10.0, where the Hopper kernels are untested; "
        "PHOTON_HOPPER_ON_10=1 allows them in a build with PHOTON_SM_100=1",
        "-D": "runs",
    }


def test_the_build_record_tells_what_was_built() -> None:
    assert BUILD_INFO["torch_target"] == "2.11"
    assert bool(BUILD_INFO["cuda"]) == bool(BUILD_INFO["cuda_archs"]) == _C.cuda_compiled


def torch_compiled_ahead(compiler: str, sources: list[Path], folder: Path) -> str:
    """The option by which sources find torch's headers compiled: they take most of the time."""
    header = folder / "torch.h"
    lines = {
        line
        for source in sources
        for file in reached(source)
        for line in TORCH_IN_TEXT.findall(file.read_text())
    }
    header.write_text("\n".join(sorted(lines)))
    subprocess.run(
        f"{compiler} -x c++-header {header} -o {header}.gch".split(), check=True, cwd=ROOT
    )
    return f"-include {header}"


@pytest.mark.slow("it compiles each of these files, and torch's headers once")
def test_every_cpp_file_compiles_without_cuda(build: ModuleType, tmp_path: Path) -> None:
    """Nobody who writes code here is without nvcc, and many who build it are. Files that do not
    look whether CUDA is there, nor include what is of CUDA, are the same for both.
    """
    plan = build.Plan(None, os.environ.get("CXX", "g++"))
    commands = []
    for library in build.LIBRARIES:
        sources = [
            source
            for pattern in library.sources
            for source in sorted(ROOT.glob(pattern))
            if source.suffix == ".cpp"
            and any(CUDA_IN_TEXT.search(file.read_text()) for file in reached(source))
        ]
        compiler = f"{plan.cxx} {build.CXX_FLAGS} {plan.flags(library)[0]}"
        if library.needs_torch:
            compiler += f" {torch_compiled_ahead(compiler, sources, tmp_path)}"
        commands += [f"{compiler} -fsyntax-only {source}" for source in sources]
    assert len(commands) > 10
    with ThreadPoolExecutor(2) as pool:
        done = list(
            pool.map(
                lambda command: subprocess.run(
                    command.split(), cwd=ROOT, capture_output=True, text=True
                ),
                commands,
            )
        )
    assert not [result.stderr for result in done if result.returncode]


def test_a_script_beside_the_checkout_imports_the_package(tmp_path: Path) -> None:
    """The checkout is a folder named like the package; an editable install must win over it."""
    (tmp_path / "photon_ext").mkdir()
    code = "import photon_ext; from photon_ext import ops; print(photon_ext.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == photon_ext.__version__, done.stderr


def test_a_wheel_is_for_all_pythons_that_it_has_a_module_for(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header = tmp_path / "Python.h"
    other = tmp_path / "python3.99"
    other.write_text(f"#!/bin/sh\necho 399 {tmp_path} .cpython-399.so\n")
    other.chmod(0o755)
    monkeypatch.setenv("PHOTON_PYTHONS", f"{sys.executable} {other}")
    with pytest.raises(SetupError, match=r"has no Python\.h: install its headers"):
        build.other_pythons()
    header.touch()
    (found,) = build.other_pythons()
    assert (found.tag, build.native_module(found).file) == ("cp399", "_C.cpython-399.so")
    tag = build.Wheel(Distribution()).get_tag()
    assert tag[:2] == (f"{build.THIS_PYTHON.tag}.cp399", "none")
    monkeypatch.setenv("PHOTON_PYTHONS", "no-such-python")
    with pytest.raises(SetupError, match="'no-such-python', which does not answer like Python"):
        build.other_pythons()
