"""How long one call takes when many follow each other: replays of a CUDA graph on a GPU, the host's
clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

Run = Callable[[], object]

CACHE_BYTES = 64 << 20  # taken for the last-level cache where torch does not tell
COLD_FACTOR = 4  # rotated operands are this many times larger than the cache
LEAST_US = 1000  # that a graph should take, so that its launch is spread thin; but no more than
LEAST_NODES = 16  # runs for that
# about 0.1 ms, in which the host queues the replay: the first node starts without waiting for it
SPIN_CYCLES = 200_000
WARM_UP = 2


class Patience(NamedTuple):
    """How much is repeated: `replays` at most, fewer (but at least 3) once they have taken
    `seconds`."""

    replays: int
    seconds: float

    def wants_more(self, replays: int, seconds: float) -> bool:
        return replays < 3 or (replays < self.replays and seconds < self.seconds)


class Timing(NamedTuple):
    """Microseconds of one run: median over replays, the fastest and the slowest replay, and how
    many there were."""

    us: float
    us_best: float
    us_worst: float
    replays: int


class Rotation(NamedTuple):
    """How many copies of an operand there are to be, so that none is still cached when its turn
    comes again."""

    cache_bytes: int
    most: int

    def copies(self, nbytes: int) -> int:
        """Copies of an operand of `nbytes`: at least 2, `most` at most."""
        return max(2, min(self.most, -(-COLD_FACTOR * self.cache_bytes // max(1, nbytes))))

    def cold(self, nbytes: int) -> bool:
        """Whether that many copies are larger than the cache."""
        return self.copies(nbytes) * nbytes > self.cache_bytes


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last-level cache."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", CACHE_BYTES))
    return CACHE_BYTES


def time_runs(runs: Sequence[Run], device: torch.device, patience: Patience) -> Timing:
    """Runs all of `runs` in turn, again and again; on CUDA they are captured in a graph, in order,
    on one stream."""
    times = _replay_times(runs, patience) if device.type == "cuda" else _host_times(runs, patience)
    return Timing(median(times), min(times), max(times), len(times))


def _replay_times(runs: Sequence[Run], patience: Patience) -> list[float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # libraries choose and allocate what they need before the capture
    with torch.cuda.stream(stream):
        for run in runs[:WARM_UP]:
            run()
    torch.cuda.synchronize()
    rounds = _rounds(len(runs), _us(runs[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    for _ in range(WARM_UP):
        graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.perf_counter()
    while patience.wants_more(len(times), time.perf_counter() - start):
        times.append(_us(graph.replay) / (rounds * len(runs)))
    return times


def _rounds(runs: int, us: float) -> int:
    """How often the runs go into a graph, if one takes about so long."""
    return -(-min(LEAST_NODES, math.ceil(LEAST_US / max(us, 1.0))) // runs)


def _us(run: Run) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _host_times(runs: Sequence[Run], patience: Patience) -> list[float]:
    for run in runs[:WARM_UP]:
        run()
    times: list[float] = []
    start = begin = time.perf_counter()
    while patience.wants_more(len(times), begin - start):
        for run in runs:
            run()
        now = time.perf_counter()
        times.append((now - begin) * 1e6 / len(runs))
        begin = now
    return times
