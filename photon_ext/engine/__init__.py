"""Continuous batching for people who want tokens: the engine, its requests and its options.

What is imported from here is loaded when it is asked for: the command line and a server's parent
read the options without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from photon_ext.engine.engine import Engine
    from photon_ext.engine.options import EngineOptions
    from photon_ext.engine.output import Output, StreamEvent
    from photon_ext.engine.parts import EngineParts
    from photon_ext.engine.request import Request
    from photon_ext.engine.request_options import RequestOptions
    from photon_ext.engine.step_output import StepOutput

_MODULES = {
    "Engine": "engine",
    "EngineOptions": "options",
    "EngineParts": "parts",
    "Output": "output",
    "Request": "request",
    "RequestOptions": "request_options",
    "StepOutput": "step_output",
    "StreamEvent": "output",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "EngineParts",
    "Output",
    "Request",
    "RequestOptions",
    "StepOutput",
    "StreamEvent",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'photon_ext.engine' has no attribute {name!r}")
    return getattr(import_module(f"photon_ext.engine.{_MODULES[name]}"), name)
