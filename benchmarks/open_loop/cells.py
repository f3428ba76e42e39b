"""The cells of a run: each load at given rates, or at rates raised until requests queue.

As a program it is the process in which one engine serves: it reads a task from stdin and says a
line per cell. It imports nothing of photon_ext itself: a peer may live in an environment without
it.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.common.result import BenchmarkError
from benchmarks.engines.worker import say
from benchmarks.open_loop.client import Client, Server
from benchmarks.open_loop.figures import figures
from benchmarks.open_loop.loads import LOADS, Load, make_asks

QUEUE_S = 1.0  # queueing above it is saturation
DOUBLINGS, HALVINGS = 16, 2
BELOW_SATURATION = 0.8
WARM_UP, WARM_UP_SEED = 8, 0  # requests at once; no cell has this seed
BURST = "burst"  # the rate of requests that arrive at once

SERVERS = {"ours": "ours:OurServer", "vllm": "vllm:VllmServer"}


class Plan(NamedTuple):
    """What is asked of one engine.

    Attributes:
        loads: names of LOADS. scale: of their lengths.
        rates: per second, or BURST. sweep: the first of them that is a number only begins a sweep.
        requests: of a cell. seconds: how long those of a sweep arrive, at least.
        seed: of the first cell of each load.
    """

    loads: list[str]
    scale: float
    rates: list[float | str]
    sweep: bool
    requests: int
    seconds: float
    seed: int


class Cells:
    """Measures one load by one engine, and says what it found.

    Each cell has prompts of its own, so that none finds those of an earlier one in a cache; engines
    get the same in the same cell.
    """

    def __init__(self, server: Server, name: str, plan: Plan) -> None:
        self._server, self._name, self._plan = server, name, plan
        self._load: Load = LOADS[name].scaled(plan.scale)
        self._seed = plan.seed

    def run(self) -> None:
        self._measure(WARM_UP, None, WARM_UP_SEED)
        rates = self._plan.rates if self._load.clocked else [BURST]
        raised = [rate for rate in rates if self._plan.sweep and rate != BURST]
        for rate in rates:
            if rate not in raised:
                self.cell(rate)
        if raised:
            found = saturation(raised[0], lambda rate: self.cell(rate)["queue_s"])
            say({"what": "saturation", "load": self._name, "rate": found})
            self.cell(BELOW_SATURATION * found, of_saturation=BELOW_SATURATION)

    def cell(self, rate: float | str, **labels: Any) -> dict[str, Any]:
        """One cell, which counts."""
        requests, per_second = self._plan.requests, rate if isinstance(rate, float) else None
        if self._plan.sweep and per_second is not None:
            lasting = math.ceil(per_second * self._plan.seconds) * self._load.turns
            requests = max(requests, lasting)
        named = rate if self._load.clocked else "one by one"
        say({"what": "begins", "told": f"{self._name}, {named}, {requests} requests"})
        found = self._measure(requests, per_second, self._seed)
        self._seed += 1
        say({"what": "cell", "load": self._name, "rate": named, **labels, **found})
        return found

    def _measure(self, requests: int, rate: float | None, seed: int) -> dict[str, Any]:
        asks = make_asks(self._load, requests, rate, self._server.vocabulary, seed)
        gc.collect()
        gc.freeze()  # the prompts are not looked through while it is measured
        run = Client(self._server, asks).run()
        found, hits = figures(asks, run), self._server.hits()
        by_turn = hits_by_turn([ask.turn for ask in asks], hits) if hits else {}
        meter = self._server.counters(found["busy_s"])
        return {**found, "hits_by_turn": by_turn, "meter": meter}


def hits_by_turn(
    turns: Sequence[int], hits: Sequence[tuple[int, int]]
) -> dict[int, dict[str, int]]:
    """Tokens of prompts, and those of them that were found in a cache, summed by turn."""
    sums: dict[int, dict[str, int]] = {}
    for turn, (prompt, cached) in zip(turns, hits, strict=True):
        one = sums.setdefault(turn, {"prompt": 0, "cached": 0})
        one["prompt"] += prompt
        one["cached"] += cached
    return sums


def saturation(start: float, queueing: Callable[[float], float]) -> float:
    """The rate at which queueing first exceeds QUEUE_S: doubled from `start` until it does, then
    the last interval is halved, by ratio. Raises BenchmarkError where nothing ever queues."""
    below, above = 0.0, start
    while queueing(above) <= QUEUE_S:
        below, above = above, 2 * above
        if above > start * 2**DOUBLINGS:
            told = f"no request queued for {QUEUE_S} s at any rate up to {below:g} per second"
            raise BenchmarkError(f"{told}; let requests arrive for longer")
    for _ in range(HALVINGS):
        middle = math.sqrt(below * above) if below else above / 2
        if queueing(middle) > QUEUE_S:
            above = middle
        else:
            below = middle
    return above


def run(task: dict[str, Any]) -> None:
    """Loads the engine and measures each load."""
    begin = time.perf_counter()
    module, _, name = SERVERS[task["engine"]].partition(":")
    make = getattr(importlib.import_module(f"benchmarks.open_loop.{module}"), name)
    server: Server = make(task)
    load_s = time.perf_counter() - begin
    said = {"version": server.version, "load_s": load_s, "start_up": server.start_up}
    say({"what": "loaded", **said})
    plan = Plan(**task["plan"])
    for load in plan.loads:
        Cells(server, load, plan).run()
    server.close()


if __name__ == "__main__":
    run(json.load(sys.stdin))
