"""Where the host's time of a step goes: plan, launch, wait, commit, deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.common.session import Session
from photon_ext.runtime import pipeline as pipeline_module
from photon_ext.runtime.slot import Slot


class _Timer:
    """`us` is how long the latest call of a timed function took, microseconds."""

    def __init__(self) -> None:
        self.us = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.us = (time.perf_counter() - begin) * 1e6

        return timed


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[_Timer]:
    """Replaces a module's function, or a class's method, by a timed one inside the block."""
    original = getattr(owner, name)
    timer = _Timer()
    setattr(owner, name, timer.wrap(original))
    try:
        yield timer
    finally:
        setattr(owner, name, original)


def host_split(session: Session, steps: int) -> dict[str, float]:
    """Median microseconds per steady step.

    `launch` is without `plan`; `commit` without `wait`, the blocking wait for the device; `deliver`
    is keeping the tokens in lists: text is the engine's business. `busy` is everything but the
    wait.
    """
    parts: dict[str, list[float]] = {
        name: [] for name in ("plan", "launch", "wait", "commit", "deliver", "busy")
    }
    clock = time.perf_counter
    with _timed(pipeline_module, "plan") as plan, _timed(Slot, "wait") as wait:
        for _ in range(steps):
            begin = clock()
            session.pipeline.launch()
            launched = clock()
            events = session.pipeline.commit()
            committed = clock()
            for event in events:
                if event.token is not None:
                    session.tokens[event.row.index].append(event.token)
            delivered = clock()
            values = {
                "plan": plan.us,
                "launch": (launched - begin) * 1e6 - plan.us,
                "wait": wait.us,
                "commit": (committed - launched) * 1e6 - wait.us,
                "deliver": (delivered - committed) * 1e6,
                "busy": (delivered - begin) * 1e6 - wait.us,
            }
            for name, value in values.items():
                parts[name].append(value)
    return {name: median(values) for name, values in parts.items()}
