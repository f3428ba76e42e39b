"""Where steps begin, which are steady, and what their kernels say."""

from __future__ import annotations

import pytest

from photon_ext.observe.analysis.gaps import GapKind, find_gaps, idle_gaps
from photon_ext.observe.analysis.intervals import Cover
from photon_ext.observe.analysis.kernels import kernel_shares, step_figures
from photon_ext.observe.analysis.report import Options, make_report
from photon_ext.observe.analysis.steps import StepMethod, find_steps, short_name
from photon_ext.observe.records import ApiCall, DeviceKind, DeviceSpan, HostSpan, Launch, Records
from photon_ext.runtime.probe import Phase
from tests.observe.kineto_records import LINEAR, Document, Loop, records_of


def eager(sequence: str, steps: int, before: str = "", inside: int = 1, gap: int = 51) -> Records:
    """One kernel of 10 us per letter, `inside` us apart, and `gap` us before each step; no API
    calls, no notes."""
    spans, now = [], 0
    for place, name in enumerate(before + sequence * steps):
        first = place >= len(before) and (place - len(before)) % len(sequence) == 0
        now += (gap if first else inside) * 1000
        spans.append(DeviceSpan(name, DeviceKind.KERNEL, now, now + 10_000, 7, 5))
        now += 10_000
    return Records("cuda", 0, now, device=spans)


def test_our_head_kernel_begins_a_step_and_its_launch_is_known() -> None:
    found = find_steps(Loop(depth=2, steps=8).records())
    assert found.method is StepMethod.HEAD
    steps = [(step.kernels, step.launch.step if step.launch else None) for step in found.steps]
    assert steps == [(3, index) for index in range(8)]
    assert [step.number for step in found.steady] == [1, 2, 3, 4, 5, 6]


def test_a_given_marker_may_end_a_step() -> None:
    """The cut of the post that the analysis follows: between two argmax."""
    records = eager("eam", 6)
    first, last = find_steps(records, "e"), find_steps(records, "m", marker_ends=True)
    assert first.method is last.method is StepMethod.MARKER
    cuts = [[(step.start, step.end) for step in found.steps] for found in (first, last)]
    assert cuts[0] == cuts[1]


def test_a_marker_that_never_comes_finds_no_steps() -> None:
    report = make_report(eager("ab", 6), Options(marker="nothing"))
    assert (report.steps.steps, report.active, report.figures) == ([], None, None)
    assert "no steps were found" in report.text()


def test_graph_launches_of_a_loop_that_is_not_ours_are_steps() -> None:
    document = Document()
    for step in range(6):
        begin = 100.0 * step
        graph = document.call("cudaGraphLaunch", begin, begin + 5)
        for place in range(3):
            document.kernel("gemv", begin + 10 + 20 * place, begin + 25 + 20 * place, graph)
        alone = document.call("cudaLaunchKernel", begin + 6, begin + 8)
        document.kernel("argmax", begin + 75, begin + 80, alone)
    found = find_steps(records_of(document))
    assert found.method is StepMethod.PERIOD
    assert [step.kernels for step in found.steady] == [4] * 4


def test_the_period_is_found_and_begins_at_the_longest_gap() -> None:
    """A prefill of its own kernels comes first; layers repeat inside a step; the rarest regular
    kernel is not the step's first."""
    found = find_steps(eager("rmsgrmsgha", 7, before="pqpqrm"))
    assert found.method is StepMethod.PERIOD
    assert [step.kernels for step in found.steady] == [10] * len(found.steady)
    assert len(found.steady) >= 5
    assert {found.kernels[step.first].name for step in found.steady} == {"r"}
    assert all(found.kernels[step.last - 1].name == "a" for step in found.steady)


def test_kernels_without_a_period_are_no_steps() -> None:
    assert find_steps(eager("abcdefgh", 1)).method is StepMethod.NONE
    assert find_steps(Records("cuda", 0, 1)).steps == []


def test_first_last_and_odd_steps_are_kept_out_and_shown() -> None:
    records = eager("abc", 8)
    end = records.device[9].end
    extra = DeviceSpan("x", DeviceKind.KERNEL, end, end + 500, 7)
    device = sorted([*records.device, extra], key=lambda span: span.start)
    report = make_report(records._replace(device=device), Options(marker="a"))
    assert [(excluded.step, excluded.why) for excluded in report.excluded] == [
        (0, "first"),
        (3, "4 kernels, the others 3"),
        (7, "last, which the window may cut"),
    ]


def test_prefills_and_other_sizes_are_kept_out() -> None:
    loop = Loop(depth=2, steps=9)
    loop.launches[2] = loop.launches[2]._replace(kind="prefill", tokens=64)
    loop.launches[5] = loop.launches[5]._replace(tokens=8)
    steps = find_steps(loop.records()).steps
    assert (steps[2].excluded, steps[5].excluded) == ("prefill", "8 tokens, the others 1")


def test_figures_of_steady_steps() -> None:
    """Three kernels of 10 us, 1 us apart, 51 us between steps: 83 us, of which 30 are kernels."""
    records = eager("abc", 8)
    steps = find_steps(records, "a")
    gaps = find_gaps(steps, records)
    figures = step_figures(steps, gaps)
    assert figures == (6, 83, 30, 53, pytest.approx(53 / 83), 3)
    third = pytest.approx(1 / 3)
    assert kernel_shares(steps) == [(name, third, 10, 1) for name in "abc"]
    assert {gap.ns for gap in idle_gaps(gaps)} == {51_000}
    report = make_report(records, Options(marker="a", bytes_per_step=83_000))
    assert report.bandwidth_gb_s == pytest.approx(1.0)
    assert report.active == pytest.approx(1 - 7 * 51 / (7 * 83 + 32))
    assert report.busy == pytest.approx(240 / (7 * 83 + 32))


def test_the_text_says_which_gaps_and_how() -> None:
    """Means and medians, step gaps and all gaps stand beside each other."""
    records = eager("abc", 8, inside=5, gap=60)._replace(
        calls=[ApiCall("cudaGraphLaunch", 0, 1, 1, 5)]
    )
    note = ": 1.5 of weights, 0.5 of keys and values (mean)"
    report = make_report(records, Options("a", False, 2_000_000, note))
    first, _, steady, step_gap, node_gaps, bandwidth, *_ = report.text().splitlines()
    assert first == "cuda backend: 8 steps, 6 of them steady, by the given marker kernel"
    assert steady.startswith("steady step: 100.0 us, kernels run 30.0 us, idle 70.0 us (70.0%")
    assert step_gap.startswith("step gap, between two steps: 60.0 us median")
    nodes = "node gaps, between the kernels of a step, all together: 10.0 us median, 10.0 mean"
    assert node_gaps.startswith(nodes)
    assert bandwidth == f"effective bandwidth: 20.0 GB/s, of 2.0 MB per step{note}"
    assert "the device waited in step and split gaps, mean per steady step, for:" in report.text()
    assert report.waited_us == {"start of queued work": 60.0}


def on_host(late: int) -> Records:
    """Six replays of two kernels, queued long before; the second one's thread loses `late` ns."""
    device, calls = [], []
    for step in range(6):
        start = 1_000_000 * (step + 1)
        launch = Launch(step, 0, "decode", 1, 1, False, 0, step, step + 1, 5)
        calls.append(launch)
        device.append(DeviceSpan("begin_step_", DeviceKind.KERNEL, start, start + 1000, 1))
        end = start + 500_000
        device.append(DeviceSpan(LINEAR, DeviceKind.KERNEL, start + 1000, end, 1))
        if late:
            device.append(DeviceSpan("lost", DeviceKind.DESCHEDULED, end, end + late, 1))
    return Records("host", 0, 7_000_000, device=device, launches=calls)


@pytest.mark.parametrize("late", [0, 100_000])
def test_time_in_which_a_host_stream_could_have_worked_is_descheduled(late: int) -> None:
    """Queued work that does not begin for half a millisecond waits for a thread, as does a kernel
    whose own thread was taken off the CPU."""
    report = make_report(on_host(late))
    assert report.waited_us == {"descheduled": pytest.approx(500)}
    assert report.descheduled_us == pytest.approx(500)
    assert "the system kept the device's thread off the CPU for 500 us" in report.text()
    assert report.figures is not None
    assert report.figures.busy_us == 500, "and is no work of the device"


def test_overlapping_kernels_leave_no_gap_and_are_not_counted_twice() -> None:
    spans = [("a", 0, 100), ("b", 50, 120), ("c", 60, 80), ("d", 130, 140)]
    device = [DeviceSpan(name, DeviceKind.KERNEL, start, end, 1) for name, start, end in spans]
    records = Records("cuda", 0, 140, device=device)
    steps = find_steps(records, "a")
    assert [(s.start, s.end, s.busy, s.kernels) for s in steps.steps] == [(0, 140, 130, 4)]
    gaps = [(gap.before, gap.after, gap.ns) for gap in find_gaps(steps, records)]
    assert gaps == [("b", "d", 10)]


def test_waiting_for_requests_is_rest_and_no_gap() -> None:
    starts = (0, 1000, 2000, 90_000, 91_000, 92_000)
    device = [DeviceSpan("begin_step", DeviceKind.KERNEL, at, at + 900, 1, at) for at in starts]
    launches = [
        Launch(step, 0, "decode", 1, 1, False, 0, at - 90, at - 10, 5)
        for step, at in enumerate(starts)
    ]
    calls = [ApiCall("cudaGraphLaunch", at - 90, at - 10, 5, at) for at in starts]
    host = [HostSpan(Phase.COLLECT, 3000, 89_000, 5)]
    records = Records("cuda", 0, 93_000, host, device, calls, launches=launches)
    report = make_report(records)
    assert [gap.kind for gap in report.gaps].count(GapKind.REST) == 1
    assert report.wall_us == pytest.approx((92_900 - 87_100) / 1e3)
    assert report.active == pytest.approx(1 - 400 / 5800)


def test_the_innermost_span_is_looked_up_by_time() -> None:
    class Span:
        def __init__(self, name: str, start: int, end: int) -> None:
            self.name, self.start, self.end = name, start, end

    outer = [Span("outer", 0, 100), Span("first", 10, 30), Span("deep", 15, 20)]
    cover = Cover([*outer, Span("next", 30, 120), Span("later", 200, 210)])
    names = ["/".join(span.name for span in piece.path) for piece in cover.within(5, 205)]
    inside = ["outer", "outer/first", "outer/first/deep", "outer/first"]
    assert names == [*inside, "outer/next", "", "later"]
    assert [span.name for span in cover.at(17)] == ["outer", "first", "deep"]
    assert cover.at(150) == ()


@pytest.mark.parametrize("name", [LINEAR, LINEAR.replace("<float, 4>", ""), "linear_kernel"])
def test_kernels_are_told_apart_by_their_own_names(name: str) -> None:
    assert short_name(name) == "linear_kernel"
