"""From activity records to counted calls and idle figures."""

import pytest

from benchmarks.common.kineto import counts, idle, window
from photon_ext.observe.records import DeviceKind, DeviceSpan, Records
from tests.observe.kineto_records import Loop


def test_the_commits_wait_and_the_launch_are_all_there_is() -> None:
    loop = Loop(steps=4)
    loop.document.call("cudaDeviceSynchronize", 1, 2)  # the profiler's own, before and after
    loop.document.call("cudaDeviceSynchronize", loop.now + 5, loop.now + 9)
    found = counts(window(loop.records()), 4)
    assert dict(found.calls) == {
        "cudaGraphLaunch": 4,
        "cudaEventSynchronize": 4,
        "cudaMemcpyAsync": 4,
    }
    assert (dict(found.copies), dict(found.copied_bytes)) == (
        {"DtoH Device -> Pinned": 4},
        {"DtoH Device -> Pinned": 128},
    )
    assert found.faults(quiet_steps=4) == []


def test_a_planted_synchronization_is_counted() -> None:
    loop = Loop(steps=4)
    at = loop.commits[1].time / 1e3  # in a commit, after its wait
    loop.document.call("cudaStreamSynchronize", at - 15, at - 5)
    loop.document.copy("HtoD (Pageable -> Device)", 1600, 1700, 999, 21, 64)
    found = counts(window(loop.records()), 4)
    assert any(fault.startswith("sync") for fault in found.faults(quiet_steps=4))
    assert found.pageable == 1


@pytest.mark.parametrize(("depth", "gap"), [(1, 4 + 8 + 20 + 8 + 5 + 10 + 12 + 3), (2, 0)])
def test_gaps_between_and_inside_steps(depth: int, gap: float) -> None:
    found = idle(Loop(depth=depth, steps=6).records())
    assert found["steps"] == 4
    assert found["step_gap_us"]["median"] == pytest.approx(gap)
    assert (found["step_us"], found["kernel_us"], found["node_gap_us"]) == (
        pytest.approx(1000),
        pytest.approx(996),
        pytest.approx(4),
    )
    assert found["kernels"] == 3
    assert set(found["share_by_kernel"]) == {"begin_step_kernel", "linear_kernel", "publish_kernel"}


ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<ArgMaxOps<float>>>"


def test_steps_of_a_loop_that_is_not_ours_end_at_their_marker() -> None:
    """Two kernels of 10 µs that overlap by 4, and the marker of 2 µs after 1; 7 µs between steps;
    one step has a kernel more."""
    step = [("linear", 0, 10), ("norm", 6, 16), (ARGMAX, 17, 19)]
    device = [
        DeviceSpan(name, DeviceKind.KERNEL, (26 * i + start) * 1000, (26 * i + end) * 1000, 7, i)
        for i in range(12)
        for name, start, end in (step if i != 8 else [*step[:2], ("norm", 12, 16), step[2]])
    ]
    found = idle(Records("cuda", 0, device[-1].end, device=device), "ArgMax")
    assert (found["steps"], found["kernels"]) == (9, 3)
    assert found["step_gap_us"]["median"] == pytest.approx(7)
    assert (found["step_us"], found["kernel_us"]) == (pytest.approx(19), pytest.approx(18))
    assert idle(Records("cuda", 0, 1, device=device), "nonesuch") == {}


def test_no_kernels_no_figures() -> None:
    assert idle(Records("cuda", 0, 1)) == {}
