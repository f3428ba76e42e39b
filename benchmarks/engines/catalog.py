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
HF, TORCH = "pip install 'transformers>=5'", "pip install torch"
OWN = "where it wants another torch, in an environment of its own, named by --python"
CB = "HF continuous batching"
CATALOG = {
    "ours": Entry("photon_ext", "ours:Ours", "photon_ext", BUILD),
    "ours-engine": Entry("photon_ext, Engine", "ours:OurEngine", "photon_ext", BUILD),
    "hf-cb": Entry(CB, "hugging_face:ContinuousBatching", "transformers", HF),
    "hf-cb-graphs": Entry(
        f"{CB}, graphs, async", "hugging_face:GraphedContinuousBatching", "transformers", HF, True
    ),
    "hf-static": Entry(
        "HF generate, static cache, eager", "hugging_face:StaticGenerate", "transformers", HF
    ),
    "compiled": Entry("torch.compile decode, gpt-fast style", "compiled:Compiled", "torch", TORCH),
    "vllm": Entry("vLLM", "offline:Vllm", "vllm", f"pip install vllm; {OWN} vllm=PATH", True),
    "sglang": Entry(
        "SGLang", "offline:Sglang", "sglang", f"pip install 'sglang[all]'; {OWN} sglang=PATH", True
    ),
}


def missing(name: str, device: str, python: str | None = None) -> str | None:
    """Why an engine cannot run here, and what to do; None: it can be tried. `python` is the
    interpreter for it, None: this one."""
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
