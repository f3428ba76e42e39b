"""Seeing the bubble: timelines, the meter, the cost model. Nothing is imported before it is used.

with photon_ext.observe.timeline() as t:
    ...                # any torch code, an Engine, a Pipeline
print(t.report.text())
t.save("trace")        # trace.json (Perfetto), timeline.png, timeline.html, summary.txt, .json
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from photon_ext.observe import cost_model, meter, prometheus
    from photon_ext.observe.capture import Timeline, timeline

_MODULES = ("cost_model", "meter", "prometheus")

__all__ = ["Timeline", "cost_model", "meter", "prometheus", "timeline"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"photon_ext.observe.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'photon_ext.observe' has no attribute {name!r}")
    value = getattr(import_module("photon_ext.observe.capture"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
