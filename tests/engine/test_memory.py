"""What is taken for available memory: the kernel's estimate, control groups of both versions,
and what torch holds and does not use.
"""

from pathlib import Path

import pytest
import torch

from photon_ext.engine.memory import available_bytes, group_available, machine_available

MIB = 2**20
MEMINFO = "MemTotal:       4096 kB\nMemFree:         100 kB\nMemAvailable:   3000 kB\n"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def group(folder: Path, limit: object, usage: int, cache: int = 0) -> None:
    stat = f"anon 5\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}"
    write(folder, memory__max=limit, memory__current=usage, memory__stat=stat)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A mount point of control groups, beside a /proc whose process is in /a/b of version 2 and
    in /c of version 1.
    """
    write(tmp_path / "proc", meminfo=MEMINFO)
    write(tmp_path / "proc/self", cgroup="7:cpuset,memory:/c\n3:cpu:/x\n0::/a/b")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def left(mount: Path) -> list[int]:
    return group_available(mount.parent / "proc", mount)


def test_file_cache_counts_as_available(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO)
    assert machine_available(tmp_path) == 3000 * 1024, "and not the 100 kB that are free"


def test_without_the_kernels_estimate_free_memory_counts(tmp_path: Path) -> None:
    assert machine_available(tmp_path / "nothing") > 0
    write(tmp_path, meminfo="MemTotal: 5 kB")
    assert machine_available(tmp_path) > 0


def test_no_groups_no_limits(mount: Path, tmp_path: Path) -> None:
    assert left(mount) == []
    assert group_available(tmp_path / "nothing", mount) == []
    group(mount / "a/b", "max", 5 * MIB)
    assert left(mount) == []


def test_a_groups_limit_less_its_use_and_its_parents_too(mount: Path) -> None:
    group(mount / "a/b", 100 * MIB, 70 * MIB, cache=30 * MIB)
    group(mount / "a", 50 * MIB, 40 * MIB)
    assert left(mount) == [60 * MIB, 10 * MIB]


def test_in_a_container_the_mount_point_is_all_there_is(mount: Path) -> None:
    group(mount, 64 * MIB, 16 * MIB)
    assert left(mount) == [48 * MIB]


def test_version_one(mount: Path) -> None:
    stat = (
        f"cache {9 * MIB}\ninactive_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {2 * MIB}"
    )
    write(
        mount / "memory/c",
        memory__limit_in_bytes=32 * MIB,
        memory__usage_in_bytes=20 * MIB,
        memory__stat=stat,
    )
    assert left(mount) == [15 * MIB]


def test_the_smallest_counts_and_never_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for groups, expected in (([], 9), ([12, 4], 4), ([-3], 0)):
        monkeypatch.setattr("photon_ext.engine.memory.machine_available", lambda: 9)
        monkeypatch.setattr(
            "photon_ext.engine.memory.group_available", lambda groups=groups: groups
        )
        assert available_bytes(torch.device("cpu")) == expected


def test_on_cuda_what_torch_has_reserved_and_does_not_use_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert available_bytes(torch.device("cuda", 0)) == 1180
