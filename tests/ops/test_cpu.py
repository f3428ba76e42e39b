"""How the CPU kernels settle in: which instruction set they use, and how many threads."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked import run_script

# as /proc/cpuinfo names what -march=x86-64-v3 and v4 use
V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def runnable_isas() -> list[str]:
    """What this machine can run, best first, by the kernel's account of it."""
    if platform.machine() != "x86_64":
        return ["baseline"]
    flags = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
    ).split()
    return [
        name
        for name, needs in (("avx512", V4), ("avx2", V3), ("baseline", set[str]()))
        if needs <= set(flags)
    ]


ASKED = (None, "", "baseline", "avx2", "avx512", "AVX2", "sse")
SCRIPT = f"""
import json, os
os.environ.pop("PHOTON_CPU_ISA", None)
for isa in {ASKED!r}:
    if isa is not None:
        os.environ["PHOTON_CPU_ISA"] = isa
    if os.fork() == 0:
        try:
            import photon_ext
            said = photon_ext.cpu_isa()
        except ImportError as error:
            said = f"ImportError: {{error}}"
        print(json.dumps([isa, said]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said() -> dict[str | None, str]:
    """What a process with each PHOTON_CPU_ISA says: forks of one that has torch already."""
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("isa", ASKED[:2])
def test_the_best_instruction_set_is_chosen(isa: str | None, said: dict[str | None, str]) -> None:
    assert said[isa] == runnable_isas()[0]


@pytest.mark.parametrize("isa", ASKED[2:])
def test_photon_cpu_isa_is_obeyed_or_refused(isa: str, said: dict[str | None, str]) -> None:
    if isa in runnable_isas():
        assert said[isa] == isa
    else:
        names = ", ".join(runnable_isas())
        assert said[isa].startswith(
            f"ImportError: PHOTON_CPU_ISA is '{isa}', expected one of those that this machine "
            f"runs: {names}"
        )


@pytest.fixture(scope="module")
def quota(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """csrc/cpu/quota.cpp with a main program around it: the built library reads this machine's
    groups alone. A library would share this process with what torch brings of libstdc++.
    """
    folder = tmp_path_factory.mktemp("quota")
    source, program = folder / "quota.cpp", folder / "quota"
    source.write_text(
        '#include <cstdio>\n#include "cpu/quota.h"\n'
        "int main(int, char** paths) {\n"
        '  std::printf("%d", photon::cpu::quota_cores(paths[1], paths[2]));\n'
        "}\n"
    )
    compiler, flags = os.environ.get("CXX", "g++"), ["-std=c++17", "-O1", "-I", str(ROOT / "csrc")]
    sources = [str(source), str(ROOT / "csrc/cpu/quota.cpp")]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    return program


def quota_cores(program: Path, groups: Path, mount: Path) -> int:
    return int(subprocess.check_output([program, groups, mount]))


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # the half is left to other threads
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {}, 0),
        # a group holds what is inside it
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "max 100000\n"}, 2),
        ("0::/the/host's path\n", {"cpu.max": "600000 200000\n"}, 3),
        ("0::/the host's/path\n", {"the host's/path/cpu.max": "600000 200000\n"}, 3),
        (
            "4:memory:/m\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            0,
        ),
        (
            "2:cpuset:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            0,
        ),
        ("nonsense\n\n0::\n", {"cpu.max": "nonsense\n"}, 0),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 0),
    ],
)
def test_quotas_of_control_groups(
    quota: Path, tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text)
    assert quota_cores(quota, tmp_path / "groups", tmp_path / "mount") == cores


def test_no_groups_are_no_quota(quota: Path, tmp_path: Path) -> None:
    assert quota_cores(quota, tmp_path / "none", tmp_path) == 0
