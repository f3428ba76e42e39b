"""How much memory a device can still give."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

# where a control group's limit, its use, and (in memory.stat) its file cache are; versions 1 and 2
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now: on CUDA what the driver has free and torch has
    reserved without use, on a CPU what the machine can free without swapping, within the limits of
    the process's control groups.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return max(0, min([machine_available(), *group_available()]))


def machine_available(proc: Path = Path("/proc")) -> int:
    """MemAvailable, the kernel's own estimate; the free memory alone where there is none."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        lines = []
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in sizes:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * int(sizes["MemAvailable"].split()[0])


def group_available(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What each group of this process that has a limit leaves; the file cache counts as free."""
    try:
        memberships = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in memberships:
        # "0::/path" for version 2, "4:memory:/path" for version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [_left(folder, _V2) for folder in _up_to(mount, path)]
        elif "memory" in controllers.split(","):
            found += [_left(folder, _V1) for folder in _up_to(mount / "memory", path)]
    return [left for left in found if left is not None]


def _up_to(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group, and those of its parents up to the mount point, which in a
    container may be all that is visible.
    """
    folder = mount / path.lstrip("/")
    yield folder
    yield from (parent for parent in folder.parents if parent == mount or mount in parent.parents)


def _left(folder: Path, names: Sequence[str]) -> int | None:
    """None: no such group here, or no limit."""
    try:
        limit, usage = (int((folder / name).read_text()) for name in names[:2])
        lines = (folder / "memory.stat").read_text().splitlines()
        stat = dict(line.split(maxsplit=1) for line in lines)
    except (OSError, ValueError):  # ValueError: "max", which is no limit
        return None
    return limit - usage + sum(int(stat.get(key, 0)) for key in names[2:])
