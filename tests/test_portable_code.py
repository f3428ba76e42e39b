"""The code for compute capability 8.0, which runs on every device but 9.0 and 10.0: no kernel that
is launched there may hold a trap. And no kernel may read global memory through the read-only cache.

csrc/cuda/ptx.cuh puts a trap where an instruction is missing below 9.0. The read-only cache may
hold what was there before a kernel waited for the one before it. The compiler's PTX tells; no such
device has to be here. The sources in setup.py's HOPPER are not compiled for 8.0: one of them
shows that a trap is seen.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.errors import SetupError

import photon_ext

CSRC = Path(photon_ext.__file__).resolve().parents[1] / "csrc"
TRAPS = "split_attention"


def with_ptx() -> list[str]:
    """The CUDA sources that include ptx.cuh, by way of others too."""
    return sorted(
        source.stem
        for source in (CSRC / "cuda").glob("*/*.cu")
        if CSRC / "cuda/ptx.cuh" in reached(source)
    )


def reached(source: Path) -> set[Path]:
    """A source and the files below csrc that it includes."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            waiting += [CSRC / name for name in names if (CSRC / name).exists()]
    return found


def traps(ptx: str) -> list[str]:
    """The kernels, by their mangled names, and functions apart from them, whose text has a trap."""
    texts = re.split(r"^(?=(?:\.\w+ )*\.(?:entry|func)\b)", ptx, flags=re.MULTILINE)
    return [
        re.split(r"\.(?:entry|func)\s", text)[1]
        for text in texts[1:]
        if re.search(r"\btrap;", text)
    ]


@pytest.mark.usefixtures("setup_py")
def test_the_kernels_that_wait_are_among_those_looked_at() -> None:
    assert {"step", "embedding", TRAPS} <= set(with_ptx())


def test_the_emulator_reports_the_accesses_of_all_kernels_of_a_chain(
    setup_py: ModuleType,
) -> None:
    def calls(source: Path) -> bool:
        files = reached(source) - {CSRC / "cuda/ptx.cuh"}
        call = re.compile(r"^[^/\n]*\b(let_next_start|wait_for_earlier)\(\);", re.MULTILINE)
        return any(call.search(file.read_text()) for file in files)

    chained = {source.stem for source in (CSRC / "cuda").glob("*/*.cu") if calls(source)}
    assert chained == set(setup_py.CHAINED) - {"kernels"}  # those that it is tested with


@pytest.mark.slow("nvcc compiles a source with all its kernels")
@pytest.mark.parametrize("name", with_ptx())
def test_no_kernel_holds_a_trap_for_older_devices_or_reads_by_the_read_only_cache(
    name: str, setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PHOTON_CUDA" not in os.environ:
        monkeypatch.setenv("PHOTON_CUDA", "1")  # also beside a torch without CUDA
    try:
        cuda = setup_py.find_cuda()
    except SetupError as error:
        pytest.skip(str(error))
    if cuda is None:
        pytest.skip("no nvcc here, or not to be used")
    ptx = tmp_path / "kernels.ptx"
    if name in setup_py.HOPPER and name != TRAPS:
        pytest.skip("not compiled for compute capability 8.0")
    command = (
        cuda.nvcc,
        *setup_py.NVCC_FLAGS.split(),
        "-arch=compute_80",
        "-ptx",
        str(next(CSRC.glob(f"cuda/*/{name}.cu"))),
        "-o",
        str(ptx),
    )
    subprocess.run(command, cwd=CSRC.parent, check=True, timeout=120)
    text = ptx.read_text()
    assert re.search(r"\bld\.global\b", text)
    assert re.findall(r"\bld\.global\S*\.nc\b.*", text) == []
    assert bool(traps(text)) == (name == TRAPS), traps(text)
