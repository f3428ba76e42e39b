"""The decode core of an LLM engine without the idle gap between steps.

Three levels, each usable without the next: ``photon_ext.ops`` (``torch.ops.photon_ext.*``), the
runtime (``Runtime``, ``Pipeline``), and the ``Engine``. The first two need torch only; the engine
needs the packages of the extra ``engine``.

``Stream``, ``Event``, ``Graph``, ``PinnedBuffer`` and ``DecodeSlot`` are native classes.
``help`` shows only their signatures: ``photon_ext/_C.pyi`` documents them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

_PROCESSES = "photon_ext.serve.", "photon_ext.bench."


def _is_command() -> bool:
    """Whether this process is the command line, which loads torch and the ops itself: there Ctrl-C
    meanwhile, or a missing torch, is told in one line. Or a process of its server or of a client,
    which may need no torch.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # what Python says while it looks for the module to run
        runs = sys.orig_argv
        return "photon_ext" in runs or any(one.startswith(_PROCESSES) for one in runs)
    return os.path.basename(program) == "photon-ext"


if not _is_command():
    from photon_ext import _library as _library
    from photon_ext import ops
    from photon_ext._library import cpu_isa, hopper_runs, num_threads, set_num_threads

if TYPE_CHECKING:
    from photon_ext._C import DecodeSlot, Event, Graph, PinnedBuffer, Stream
    from photon_ext.engine import (
        Engine,
        EngineOptions,
        EngineParts,
        Output,
        Request,
        RequestOptions,
        StepOutput,
        StreamEvent,
    )
    from photon_ext.errors import (
        CaptureError,
        CompilerBusy,
        ConfigError,
        DeviceError,
        EngineDeadError,
        ModelError,
        NoFreeRow,
        PhotonError,
        PipelineError,
        QueueFull,
        RequestError,
    )
    from photon_ext.runtime import (
        Chunk,
        PageAppend,
        Pipeline,
        RowEvent,
        RowParams,
        RowTable,
        Runtime,
        StepFeatures,
        StepPlan,
        StepTensors,
    )
    from photon_ext.sampling import (
        Constraint,
        SamplingParams,
        from_allowed_ids,
        from_callable,
        set_ids,
    )
    from photon_ext.weight import Weight
    from photon_ext.weight_format import WeightFormat

__version__ = "0.1.0"

_LAZY = {
    "CaptureError": "photon_ext.errors",
    "Chunk": "photon_ext.runtime",
    "CompilerBusy": "photon_ext.errors",
    "ConfigError": "photon_ext.errors",
    "Constraint": "photon_ext.sampling",
    "DecodeSlot": "photon_ext._C",
    "DeviceError": "photon_ext.errors",
    "Engine": "photon_ext.engine",
    "EngineDeadError": "photon_ext.errors",
    "EngineOptions": "photon_ext.engine",
    "EngineParts": "photon_ext.engine",
    "Event": "photon_ext._C",
    "Graph": "photon_ext._C",
    "ModelError": "photon_ext.errors",
    "NoFreeRow": "photon_ext.errors",
    "Output": "photon_ext.engine",
    "PageAppend": "photon_ext.runtime",
    "PhotonError": "photon_ext.errors",
    "PinnedBuffer": "photon_ext._C",
    "Pipeline": "photon_ext.runtime",
    "PipelineError": "photon_ext.errors",
    "QueueFull": "photon_ext.errors",
    "Request": "photon_ext.engine",
    "RequestError": "photon_ext.errors",
    "RequestOptions": "photon_ext.engine",
    "RowEvent": "photon_ext.runtime",
    "RowParams": "photon_ext.runtime",
    "RowTable": "photon_ext.runtime",
    "Runtime": "photon_ext.runtime",
    "SamplingParams": "photon_ext.sampling",
    "StepFeatures": "photon_ext.runtime",
    "StepOutput": "photon_ext.engine",
    "StepPlan": "photon_ext.runtime",
    "StepTensors": "photon_ext.runtime",
    "Stream": "photon_ext._C",
    "StreamEvent": "photon_ext.engine",
    "Weight": "photon_ext.weight",
    "WeightFormat": "photon_ext.weight_format",
    "from_allowed_ids": "photon_ext.sampling",
    "from_callable": "photon_ext.sampling",
    "cpu_isa": "photon_ext._library",
    "hopper_runs": "photon_ext._library",
    "num_threads": "photon_ext._library",
    "set_ids": "photon_ext.sampling",
    "set_num_threads": "photon_ext._library",
}

_MODULES = ("ops", "observe", "reference", "runtime", "sampling", "serve")

__all__ = [
    "CaptureError",
    "Chunk",
    "CompilerBusy",
    "ConfigError",
    "Constraint",
    "DecodeSlot",
    "DeviceError",
    "Engine",
    "EngineDeadError",
    "EngineOptions",
    "EngineParts",
    "Event",
    "Graph",
    "ModelError",
    "NoFreeRow",
    "Output",
    "PageAppend",
    "PhotonError",
    "PinnedBuffer",
    "Pipeline",
    "PipelineError",
    "QueueFull",
    "Request",
    "RequestError",
    "RequestOptions",
    "RowEvent",
    "RowParams",
    "RowTable",
    "Runtime",
    "SamplingParams",
    "StepFeatures",
    "StepOutput",
    "StepPlan",
    "StepTensors",
    "Stream",
    "StreamEvent",
    "Weight",
    "WeightFormat",
    "cpu_isa",
    "from_allowed_ids",
    "from_callable",
    "hopper_runs",
    "num_threads",
    "ops",
    "set_ids",
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
