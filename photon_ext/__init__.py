"""The decode core of an LLM engine without the idle gap between steps.

Three levels, each usable without the next: ``photon_ext.ops`` (``torch.ops.photon_ext.*``), the
runtime (``Runtime``, ``Pipeline``), and the ``Engine``. The first two need torch only; the engine
needs the packages of the extra ``engine``.

``Stream``, ``Event``, ``Graph``, ``PinnedBuffer`` and ``DecodeSlot`` are native classes, of which
``help`` shows the signatures alone: ``photon_ext/_C.pyi`` documents them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from photon_ext import _library as _library
from photon_ext import ops
from photon_ext._library import cpu_isa, hopper_runs, num_threads, set_num_threads

if TYPE_CHECKING:
    from photon_ext._C import DecodeSlot, Event, Graph, PinnedBuffer, Stream
    from photon_ext.engine import Engine
    from photon_ext.runtime import Pipeline, RowTable, Runtime
    from photon_ext.sampling import Constraint, SamplingParams, from_allowed_ids, from_callable

__version__ = "0.1.0"

_LAZY = {
    "Constraint": "photon_ext.sampling",
    "DecodeSlot": "photon_ext._C",
    "Engine": "photon_ext.engine",
    "Event": "photon_ext._C",
    "Graph": "photon_ext._C",
    "PinnedBuffer": "photon_ext._C",
    "Pipeline": "photon_ext.runtime",
    "RowTable": "photon_ext.runtime",
    "Runtime": "photon_ext.runtime",
    "SamplingParams": "photon_ext.sampling",
    "Stream": "photon_ext._C",
    "from_allowed_ids": "photon_ext.sampling",
    "from_callable": "photon_ext.sampling",
}

_MODULES = ("observe", "reference", "runtime", "sampling")

__all__ = [
    "Constraint",
    "DecodeSlot",
    "Engine",
    "Event",
    "Graph",
    "PinnedBuffer",
    "Pipeline",
    "RowTable",
    "Runtime",
    "SamplingParams",
    "Stream",
    "cpu_isa",
    "from_allowed_ids",
    "from_callable",
    "hopper_runs",
    "num_threads",
    "ops",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"photon_ext.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'photon_ext' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
