"""Continuous batching for people who want tokens: the engine, its requests and its options."""

from photon_ext.engine.engine import Engine
from photon_ext.engine.options import EngineOptions
from photon_ext.engine.output import Output, StepOutput, StreamEvent
from photon_ext.engine.request import Request

__all__ = ["Engine", "EngineOptions", "Output", "Request", "StepOutput", "StreamEvent"]
