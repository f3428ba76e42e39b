"""Where steps begin, which are steady, and what their kernels say."""

from __future__ import annotations

import pytest

from photon_ext.observe.analysis.gaps import Gap, GapKind, find_gaps, step_gaps
from photon_ext.observe.analysis.intervals import Cover
from photon_ext.observe.analysis.kernels import (
    allocations,
    copies,
    histogram,
    kernel_shares,
    step_figures,
    transitions,
)
from photon_ext.observe.analysis.phases import phase_times
from photon_ext.observe.analysis.report import Options, make_report
from photon_ext.observe.analysis.steps import StepMethod, find_steps, short_name
from photon_ext.observe.records import ApiCall, DeviceKind, DeviceSpan, HostSpan, Launch, Records
from photon_ext.runtime.probe import Phase
from tests.observe.kineto_records import Document, Loop, records_of, user_loop


def eager(sequence: str, steps: int, before: str = "", gap: int = 50) -> Records:
    """One kernel of 10 us per letter, 1 us apart, and `gap` us before each step; no API calls,
    no notes.
    """
    spans, now = [], 0
    for name in [*before, *(["|", *sequence] * steps)]:
        if name == "|":
            now += gap * 1000
            continue
        spans.append(DeviceSpan(name, DeviceKind.KERNEL, now, now + 10_000, 7))
        now += 11_000
    return Records("cuda", 0, now, device=spans)


def test_our_head_kernel_begins_a_step_and_its_launch_is_known() -> None:
    found = find_steps(Loop(depth=2, steps=8).records())
    assert found.method is StepMethod.HEAD
    assert [(step.kernels, step.launch.step if step.launch else None) for step in found.steps] == [
        (3, index) for index in range(8)
    ]
    assert [step.number for step in found.steady] == [1, 2, 3, 4, 5, 6]


def test_a_given_marker_may_end_a_step() -> None:
    """The cut of the post that the analysis follows: between two argmax."""
    records = eager(["embed", "mlp", "argmax"], 6)  # type: ignore[arg-type]
    first = find_steps(records, "embed")
    last = find_steps(records, "argmax", marker_ends=True)
    assert first.method is last.method is StepMethod.MARKER
    assert [(step.start, step.end) for step in first.steps] == [
        (step.start, step.end) for step in last.steps
    ]


def test_a_marker_that_never_comes_finds_no_steps() -> None:
    report = make_report(eager("ab", 6), Options(marker="nothing"))
    assert (report.steps.steps, report.active, report.figures) == ([], None, None)
    assert "no steps were found" in report.text()


def test_graph_launches_are_steps() -> None:
    document = Document()
    for step in range(6):
        begin = 100.0 * step
        graph = document.call("cudaGraphLaunch", begin, begin + 5)
        for place in range(3):
            document.kernel("gemv", begin + 10 + 20 * place, begin + 25 + 20 * place, graph)
        document.kernel(
            "argmax",
            begin + 75,
            begin + 80,
            document.call("cudaLaunchKernel", begin + 6, begin + 8),
        )
    found = find_steps(records_of(document))
    assert found.method is StepMethod.GRAPH
    assert [step.kernels for step in found.steps] == [4] * 6


def test_the_period_is_found_and_begins_at_the_longest_gap() -> None:
    """A prefill of its own kernels comes first; layers repeat inside a step; the rarest regular
    kernel is not the step's first.
    """
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
    extra = DeviceSpan(
        "x", DeviceKind.KERNEL, records.device[9].end, records.device[9].end + 500, 7
    )
    records = records._replace(device=sorted([*records.device, extra], key=lambda span: span.start))
    report = make_report(records, Options(marker="a"))
    assert [(number, why) for number, why, _, _ in report.excluded] == [
        (0, "first"),
        (3, "4 kernels, the others 3"),
        (7, "last, which the window may cut"),
    ]


def test_prefills_and_other_sizes_are_kept_out() -> None:
    loop = Loop(depth=2, steps=9)
    loop.launches[2] = loop.launches[2]._replace(kind="prefill", lines=64)
    loop.launches[5] = loop.launches[5]._replace(lines=8)
    steps = find_steps(loop.records()).steps
    assert (steps[2].excluded, steps[5].excluded) == ("prefill", "8 lines, the others 1")


def test_figures_of_steady_steps() -> None:
    """Three kernels of 10 us, 1 us apart, 50 more between steps: 83 us, of which 30 are kernels."""
    records = eager("abc", 8)
    steps = find_steps(records, "a")
    gaps = find_gaps(steps, records)
    figures = step_figures(steps, gaps)
    assert figures is not None
    assert (figures.wall_us, figures.busy_us, figures.gap_us, figures.kernels) == (83, 30, 53, 3)
    assert figures.gap_share == pytest.approx(53 / 83)
    assert [
        (share.name, share.share, share.mean_us, share.per_step) for share in kernel_shares(steps)
    ] == [(name, pytest.approx(1 / 3), 10, 1) for name in "abc"]
    assert {gap.ns for gap in step_gaps(gaps)} == {51_000}
    report = make_report(records, Options(marker="a", bytes_per_step=83_000))
    assert report.bandwidth_gb_s == pytest.approx(1.0)
    assert report.active == pytest.approx(1 - 7 * 51 / (7 * 83 + 32))
    assert report.busy == pytest.approx(240 / (7 * 83 + 32))


def test_figures_of_gaps_say_which_and_how() -> None:
    """Means and medians, step gaps and all gaps stand beside each other; "host" is the backend,
    not the host against the device.
    """
    kernels = [
        DeviceSpan(name, DeviceKind.KERNEL, start, start + 10_000, 7)
        for name, start in places("abc", 8, inside=15_000, between=60_000)
    ]
    calls = [ApiCall("cudaGraphLaunch", 0, 1, 1, 5)]
    records = Records(
        "host",
        0,
        kernels[-1].end,
        device=[span._replace(correlation=5) for span in kernels],
        calls=calls,
    )
    report = make_report(
        records,
        Options(
            marker="a",
            bytes_per_step=2_000_000,
            bytes_note=": 1.5 of weights, 0.5 of keys and values (mean)",
        ),
    )
    first, _, steady, step_gap, node_gaps, bandwidth, *_ = report.text().splitlines()
    assert first == "host backend: 8 steps, 6 of them steady, by the given marker kernel"
    assert steady.startswith(
        "steady step: 100.0 us, kernels run 30.0 us, idle 70.0 us (70.0 %, all gaps together)"
    )
    assert step_gap.startswith("step gap, between two steps: 60.0 us median")
    assert (
        node_gaps
        == "node gaps, between the kernels of a step, all of a step together: 10.0 us median, 10.0 "
        "mean"
    )
    assert (
        bandwidth
        == "effective bandwidth: 20.0 GB/s, of 2.0 MB per step: 1.5 of weights, 0.5 of keys and "
        "values (mean)"
    )
    (found,) = report.findings
    assert found.text == (
        "the device idles 70 us per step (mean) between kernels, with the next work queued "
        "already, "
        "in 6 step gaps (60.0 us) and 12 node gaps of 2 us or more (10.0 us) of 6 steady steps"
    )
    assert "the device waited in step and split gaps, mean per steady step, for:" in report.text()
    assert report.waited_us == {"nobody (the next work was queued already)": 60.0}


def places(names: str, steps: int, inside: int, between: int) -> list[tuple[str, int]]:
    """Kernels of 10 us; the next begins `inside` after the one before, that of the next step
    `between` after the last one's end.
    """
    made, now = [], 0
    for _ in range(steps):
        for name in names:
            made.append((name, now))
            now += inside
        now += between - inside + 10_000
    return made


def test_overlapping_kernels_leave_no_gap_and_are_not_counted_twice() -> None:
    spans = [("a", 0, 100), ("b", 50, 120), ("c", 60, 80), ("d", 130, 140)]
    records = Records(
        "cuda",
        0,
        140,
        device=[DeviceSpan(name, DeviceKind.KERNEL, start, end, 1) for name, start, end in spans],
    )
    steps = find_steps(records, "a")
    assert [(step.start, step.end, step.busy, step.kernels) for step in steps.steps] == [
        (0, 140, 130, 4)
    ]
    assert [(gap.before, gap.after, gap.ns) for gap in find_gaps(steps, records)] == [
        ("b", "d", 10)
    ]


@pytest.mark.parametrize(
    ("us", "label"),
    [
        (0.5, "< 1"),
        (1, "1-5"),
        (4.9, "1-5"),
        (5, "5-10"),
        (10, "10-50"),
        (49, "10-50"),
        (50, "> 50"),
    ],
)
def test_gaps_by_length(us: float, label: str) -> None:
    bins = histogram([Gap(0, round(us * 1000), GapKind.NODE, "a", "b", 0)], steps=2)
    assert [(b.label, b.times, b.share, b.us_per_step) for b in bins if b.times] == [
        (label, 1, 1.0, us / 2)
    ]


def test_gaps_by_transition_costliest_first() -> None:
    gaps = [
        Gap(0, ns, GapKind.NODE, "a", after, 0)
        for ns, after in ((4000, "b"), (6000, "b"), (9000, "c"))
    ]
    assert [tuple(found) for found in transitions(gaps, 2)] == [
        ("a", "b", 2, 5.0, 6.0, 5.0),
        ("a", "c", 1, 9.0, 9.0, 4.5),
    ]


def test_allocating_calls_and_copies() -> None:
    calls = [
        ApiCall("cuMemAllocAsync", 0, 5000, 1),
        ApiCall("cuMemAllocAsync", 9000, 12_000, 1),
        ApiCall("cudaEventRecord", 0, 1, 1),
    ]
    device = [DeviceSpan("DtoH Device -> Pinned", DeviceKind.COPY, 0, 1000, 2, 0, 4000)]
    records = Records("cuda", 0, 1, calls=calls, device=device)
    assert [tuple(cost) for cost in allocations(records, 4)] == [("cuMemAllocAsync", 2, 4.0, 0.5)]
    assert [tuple(cost) for cost in copies(records)] == [
        ("DtoH Device -> Pinned", 1, 4000, 1.0, 4.0)
    ]


def test_phases_of_a_step_on_the_device() -> None:
    loop = Loop(depth=2)
    assert phase_times(find_steps(loop.records()), loop.records()) == {
        "carry-over": pytest.approx(4),
        "forward": pytest.approx(894),
        "sampling": pytest.approx(98),
        "copy out": pytest.approx(2),
    }
    user = user_loop(items=0)
    assert phase_times(find_steps(user), user) == {}


def test_waiting_for_requests_is_rest_and_no_gap() -> None:
    spans = [
        DeviceSpan("begin_step", DeviceKind.KERNEL, start, start + 900, 1)
        for start in (0, 1000, 2000, 90_000, 91_000, 92_000)
    ]
    launches = [
        Launch(step, 0, "decode", 1, 1, False, 0, span.start - 90, span.start - 10, 5)
        for step, span in enumerate(spans)
    ]
    host = [HostSpan(Phase.COLLECT, 3000, 89_000, 5)]
    calls = [
        ApiCall("cudaGraphLaunch", launch.start, launch.end, 5, index + 1)
        for index, launch in enumerate(launches)
    ]
    device = [span._replace(correlation=index + 1) for index, span in enumerate(spans)]
    report = make_report(
        Records("cuda", 0, 93_000, host=host, device=device, calls=calls, launches=launches)
    )
    assert [gap.kind for gap in report.gaps].count(GapKind.REST) == 1
    assert report.wall_us == pytest.approx((92_900 - 87_100) / 1e3)
    assert report.active == pytest.approx(1 - 400 / 5800)


def test_the_innermost_span_is_looked_up_by_time() -> None:
    class Span:
        def __init__(self, name: str, start: int, end: int) -> None:
            self.name, self.start, self.end = name, start, end

    cover = Cover(
        [
            Span("outer", 0, 100),
            Span("first", 10, 30),
            Span("deep", 15, 20),
            Span("next", 30, 120),
            Span("later", 200, 210),
        ]
    )
    names = ["/".join(span.name for span in piece.path) for piece in cover.within(5, 205)]
    assert names == [
        "outer",
        "outer/first",
        "outer/first/deep",
        "outer/first",
        "outer/next",
        "",
        "later",
    ]
    assert [span.name for span in cover.at(17)] == ["outer", "first", "deep"]
    assert cover.at(150) == ()


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
