"""Continuous batching for people who want tokens: the engine, its requests and its options."""

from photon_ext.engine.engine import Engine
from photon_ext.engine.options import EngineOptions
from photon_ext.engine.output import Output, StreamEvent
from photon_ext.engine.request import Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.engine.step_output import StepOutput

__all__ = [
    "Engine",
    "EngineOptions",
    "Output",
    "Request",
    "RequestOptions",
    "StepOutput",
    "StreamEvent",
]
