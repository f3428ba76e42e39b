"""Which engines there are, what each needs, and how to get it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.engines.peer import Peer, Setup


class Entry(NamedTuple):
    """One engine.

    Attributes:
        title: in tables.
        place: "module:class" under benchmarks.engines.
        package: what must be importable.
        how: how to get that.
        gpu: whether it runs on CUDA only.
    """

    title: str
    place: str
    package: str
    how: str
    gpu: bool = False


BUILD = "python setup.py build_ext --inplace"
TRANSFORMERS = "pip install 'transformers>=5'"
CATALOG = {
    "ours": Entry("photon_ext", "ours:Ours", "photon_ext", BUILD),
    "ours-engine": Entry("photon_ext, Engine", "ours:OurEngine", "photon_ext", BUILD),
    "hf-cb": Entry(
        "HF continuous batching", "hugging_face:ContinuousBatching", "transformers", TRANSFORMERS
    ),
    "hf-cb-graphs": Entry(
        "HF continuous batching, graphs, async",
        "hugging_face:GraphedContinuousBatching",
        "transformers",
        TRANSFORMERS,
        gpu=True,
    ),
    "hf-static": Entry(
        "HF generate, static cache, eager",
        "hugging_face:StaticGenerate",
        "transformers",
        TRANSFORMERS,
    ),
    "compiled": Entry(
        "torch.compile decode, gpt-fast style", "compiled:Compiled", "torch", "pip install torch"
    ),
    "compiled-tuned": Entry(
        "torch.compile decode, gpt-fast's settings",
        "compiled:TunedCompiled",
        "torch",
        "pip install torch",
        gpu=True,
    ),
    "vllm": Entry(
        "vLLM",
        "vllm_peer:Vllm",
        "vllm",
        "pip install vllm; where it wants another torch, in an environment of its own, named by "
        "--python vllm=PATH",
        gpu=True,
    ),
    "sglang": Entry(
        "SGLang",
        "sglang_peer:Sglang",
        "sglang",
        "pip install 'sglang[all]'; where it wants another torch, in an environment of its own, "
        "named by --python sglang=PATH",
        gpu=True,
    ),
}


def missing(name: str, device: str, python: str | None = None) -> str | None:
    """Why an engine cannot run here, and what to do; None: it can be tried.

    `python` is the interpreter for it, None: this one.
    """
    entry = CATALOG[name]
    if not _importable(entry.package, python):
        return f"{entry.package} is not installed{f' for {python}' if python else ''}: {entry.how}"
    if entry.gpu and device != "cuda":
        return f"{entry.title} is measured on a GPU only, this run is on {device}"
    return None


def _importable(package: str, python: str | None) -> bool:
    if python is None:
        return importlib.util.find_spec(package) is not None
    question = (
        f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    )
    try:
        return (
            subprocess.run([python, "-c", question], capture_output=True, timeout=60).returncode
            == 0
        )
    except (OSError, subprocess.SubprocessError):
        return False


def open_peer(name: str, setup: Setup) -> Peer:
    """Imports the engine and loads the model."""
    module, _, title = CATALOG[name].place.partition(":")
    make: Callable[[Setup], Peer] = getattr(
        importlib.import_module(f"benchmarks.engines.{module}"), title
    )
    return make(setup)
