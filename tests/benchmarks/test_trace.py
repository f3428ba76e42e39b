"""From activity records to calls, steps and gaps."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch

from benchmarks.common.trace import Call, Kernel, Trace, counts, idle, outermost, parse, short_name, step_times, window

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


class Event(NamedTuple):
    """What `parse` asks of a kineto event."""

    text: str
    start: int
    duration: int
    device: torch.autograd.DeviceType = CPU
    correlation: int = 0

    def name(self) -> str:
        return self.text

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> torch.autograd.DeviceType:
        return self.device

    def device_resource_id(self) -> int:
        return 7

    def correlation_id(self) -> int:
        return self.correlation


def replay(correlation: int, start: int) -> Iterable[Event]:
    """Three kernels of 10 µs, 2 µs apart."""
    for i, name in enumerate(("begin_step_kernel", "void linear_kernel<float>(Params)", "publish_kernel")):
        yield Event(name, start + i * 12_000, 10_000, CUDA, correlation)


def records(steps: int = 4, period: int = 40_000, correlated: bool = True) -> list[Event]:
    made = [Event("cudaDeviceSynchronize", -50, 20), Event("aten::empty", 0, 5)]
    for step in range(steps):
        begin = step * period
        made += [
            Event("cudaGraphLaunch", begin, 900),
            Event("cuGraphLaunch", begin + 10, 800),
            Event("cudaEventSynchronize", begin + 2000, 30_000),
        ]
        made += replay(step + 1 if correlated else 0, begin + 1000)
        made.append(Event("Memcpy DtoH (Device -> Pinned)", begin + 36_000, 500, CUDA))
    made.append(Event("cudaDeviceSynchronize", steps * period + 10, 20))
    return made[::-1]


def test_calls_inside_calls_and_the_profilers_own_are_left_out() -> None:
    found = counts(window(parse(records())), 4)
    assert dict(found.calls) == {"cudaGraphLaunch": 4, "cudaEventSynchronize": 4}
    assert dict(found.copies) == {"DtoH Device -> Pinned": 4}
    assert found.faults(quiet_steps=4) == []


def test_a_planted_synchronization_is_counted() -> None:
    planted = [*records(), Event("cudaStreamSynchronize", 75_000, 100), Event("Memcpy HtoD (Pageable -> Device)", 76_000, 100, CUDA)]
    found = counts(window(parse(planted)), 4)
    assert any(fault.startswith("sync") for fault in found.faults(quiet_steps=4))
    assert found.pageable == 1


def test_outermost_is_judged_per_thread() -> None:
    calls = [Call("cudaA", 0, 100, 1), Call("cuA", 10, 90, 1), Call("cuB", 20, 30, 2), Call("cudaC", 100, 110, 1)]
    assert [call.name for call in outermost(calls)] == ["cudaA", "cuB", "cudaC"]


def test_gaps_between_and_inside_steps() -> None:
    for correlated in (True, False):
        found = idle(parse(records(steps=6, correlated=correlated)))
        assert found["steps"] == 4
        assert found["step_gap_us"]["median"] == 6.0  # 40 µs period, 34 µs from first kernel to last
        assert found["step_us"] == 34.0
        assert found["kernel_us"] == 30.0
        assert found["node_gap_us"] == 4.0
        assert found["kernels"] == 3
        assert set(found["share_by_kernel"]) == {"begin_step_kernel", "linear_kernel", "publish_kernel"}


def test_overlapping_kernels_are_not_counted_twice() -> None:
    kernels = [Kernel("begin_step", 0, 100, 1), Kernel("a", 50, 120, 1), Kernel("b", 60, 80, 1), Kernel("c", 130, 140, 1)]
    (step,) = step_times(kernels)
    assert (step.start, step.end, step.busy, step.kernels) == (0, 140, 130, 4)


def test_no_kernels_no_figures() -> None:
    assert idle(Trace([], [], [])) == {}


@pytest.mark.parametrize(
    "name",
    [
        "void photon::cuda::(anonymous namespace)::linear_kernel<float, 4>(photon::LinearParams)",
        "photon::cuda::(anonymous namespace)::linear_kernel(photon::LinearParams)",
        "linear_kernel",
    ],
)
def test_kernels_are_told_apart_by_their_own_names(name: str) -> None:
    assert short_name(name) == "linear_kernel"
