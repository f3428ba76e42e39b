"""Bubbles planted into records as torch.profiler gives them on a GPU: each is found, and named
for what it is.
"""

from __future__ import annotations

import pytest

from photon_ext.observe.analysis.findings import Finding, FindingKind
from photon_ext.observe.analysis.gaps import GapKind
from photon_ext.observe.analysis.report import Report, make_report
from tests.observe.kineto_records import COMPUTE, IN, LINEAR, Document, Loop, records_of, user_loop


def report_of(loop: Loop) -> Report:
    return make_report(loop.records())


def of_kind(report: Report, kind: FindingKind) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind is kind]


def test_a_clean_pipeline_has_no_findings() -> None:
    report = report_of(Loop(depth=2))
    assert report.findings == []
    assert report.active == pytest.approx(1.0, abs=1e-3)
    assert report.step_gap is not None
    assert (report.step_gap.steps, report.step_gap.max_us) == (10, 0)


@pytest.mark.parametrize(("depth", "waits"), [(1, True), (2, False)])
def test_a_sleep_in_commit_is_named_where_the_device_waits_for_it(depth: int, waits: bool) -> None:
    """300 us more in commit: at depth 1 the device waits for them, at depth 2 they run
    underneath the next step.
    """
    report = report_of(Loop(depth=depth, commit_us=320))
    commits = [finding for finding in of_kind(report, FindingKind.GAP) if finding.where == "commit"]
    assert bool(commits) is waits
    if waits:
        assert report.findings[0] is commits[0]
        assert commits[0].us == pytest.approx(320)
        assert (
            "320 us per step (mean) for commit, in 10 step gaps of 10 steady steps"
            in commits[0].text
        )
        assert report.waited_us["commit"] == pytest.approx(320)


def test_a_pageable_copy_in_the_mask_path_is_named() -> None:
    report = report_of(Loop(depth=2, mask_us=900, pageable=True))
    (copy,) = of_kind(report, FindingKind.PAGEABLE)
    assert (copy.times, copy.where) == (12, "mask: aten::copy_")
    assert "pageable copies in mask: aten::copy_" in copy.text
    waits = {finding.where: finding.us for finding in of_kind(report, FindingKind.GAP)}
    assert waits["pageable copy (mask: aten::copy_)"] == pytest.approx(200)
    # what is left of the masks when the forward is done; nothing else is blamed for the copy
    assert waits["mask"] < 60


def test_masks_without_a_pageable_copy_are_only_masks() -> None:
    """Masks that take longer than the forward that runs meanwhile: the late sampling waits for
    them.
    """
    report = report_of(Loop(depth=2, mask_us=1100))
    assert of_kind(report, FindingKind.PAGEABLE) == []
    assert of_kind(report, FindingKind.GAP)[0].where == "mask"
    assert {gap.kind for gap in report.gaps if gap.ns > 100_000} == {GapKind.SPLIT}
    assert report.split_gap is not None
    assert report.split_gap.median_us > 200


def test_masks_made_underneath_the_forward_cost_nothing() -> None:
    report = report_of(Loop(depth=2, mask_us=300))
    assert report.findings == []


def test_an_item_in_user_code_is_named() -> None:
    """A stock loop: kernels launched one by one, then argmax, then .item(), which waits for the
    device. No phases of ours.
    """
    report = make_report(user_loop(items=1))
    (sync,) = of_kind(report, FindingKind.SYNC)
    assert (sync.times, sync.where) == (10, "aten::item in decode one token")
    assert "10 calls of cudaStreamSynchronize in aten::item" in sync.text
    assert report.method == "the period of the kernel sequence"
    waits = [finding.where for finding in of_kind(report, FindingKind.GAP)]
    assert "synchronizing call (cudaStreamSynchronize, aten::item in decode one token)" in waits


def test_items_in_a_row_are_named_though_each_is_short() -> None:
    """A token of each of eight rows: the host wakes up soon, eight times while the device has
    nothing to do.
    """
    report = make_report(user_loop(items=8, wake_us=1))
    (sync,) = of_kind(report, FindingKind.SYNC)
    assert sync.times == 80
    waits = {finding.where: finding for finding in of_kind(report, FindingKind.GAP)}
    item = waits["synchronizing call (cudaStreamSynchronize, aten::item in decode one token)"]
    assert item.times == 8, "once per gap"
    assert item.us > 10


def test_causes_that_are_small_one_by_one_are_named_together() -> None:
    """A quick wake-up and little Python: no cause has 10 us of a step, and still the device
    idles for more than that.
    """
    report = make_report(user_loop(items=1, wake_us=2, python_us=4))
    (wait,) = of_kind(report, FindingKind.GAP)
    assert report.step_gap is not None
    assert wait.us == pytest.approx(report.step_gap.median_us)
    assert wait.where.startswith(
        "synchronizing call (cudaStreamSynchronize, aten::item in decode one token), "
    )
    assert (
        f"the device waits {wait.us:.0f} us per step (mean) for small things: synchronizing call"
        in wait.text
    )
    assert all(f", {cause} (" in wait.text for cause in ("launch", "other code of the host"))
    assert " and 2 more, in 8 step gaps of 8 steady steps" in wait.text


def test_the_same_loop_without_item_has_no_synchronization() -> None:
    assert of_kind(make_report(user_loop(items=0)), FindingKind.SYNC) == []


def test_an_out_copy_behind_the_next_forward_is_named() -> None:
    report = report_of(Loop(depth=2, late_copy=True))
    (late,) = of_kind(report, FindingKind.OUT_COPY)
    assert late.times >= 10
    assert late.us == pytest.approx(1000, rel=0.1)  # a whole step late
    assert "behind the next step" in late.text


def test_an_out_copy_in_time_is_not() -> None:
    for depth in (1, 2):
        assert of_kind(report_of(Loop(depth=depth)), FindingKind.OUT_COPY) == []


def test_zombies_are_counted_and_their_steps_timed() -> None:
    report = report_of(Loop(depth=2, zombies=(4, 7)))
    (zombies,) = of_kind(report, FindingKind.ZOMBIES)
    assert (report.zombies, report.rows, zombies.times) == (2, 12, 2)
    # 120 us each: the dead linear returns at once
    assert "2 steps had no other rows and took 240 us" in zombies.text
    assert [why for _, why, _, _ in report.excluded].count("zombies only") == 2


def test_allocations_are_named_with_their_op() -> None:
    loop = Loop(depth=2)
    at = loop.commits[3].time / 1e3
    loop.document.call("cudaMalloc", at - 12, at - 4)
    loop.document.op("aten::empty", at - 13, at - 3)
    (found,) = of_kind(make_report(loop.records()), FindingKind.ALLOCATION)
    assert found.text == "1 calls of cudaMalloc in commit: aten::empty, 8.0 us each (median)"


def test_a_step_held_back_by_a_copy_to_the_device_says_so() -> None:
    """The launch was in time; its input was not."""
    document = Document()
    for step in range(6):
        begin = 1000.0 * (step + 1)
        sent = document.call("cudaMemcpyAsync", begin - 60, begin - 57)
        document.copy("HtoD (Pinned -> Device)", begin + 10, begin + 90, sent, IN, 4096)
        graph = document.call("cudaGraphLaunch", begin - 56, begin - 50)
        document.kernel("begin_step_kernel", begin + 100, begin + 110, graph)
        document.kernel(LINEAR, begin + 110, begin + 1000, graph, COMPUTE)
    report = make_report(records_of(document))
    assert report.waited_us["copy to the device"] == pytest.approx(80)


@pytest.mark.parametrize("depth", [1, 2])
def test_records_without_the_launch_they_came_from_say_the_same(depth: int) -> None:
    """Some profilers leave a graph's kernels without a correlation: steps are matched with their
    launches by order.
    """
    loop = Loop(depth=depth, commit_us=320, late_copy=depth == 2)
    whole = loop.records()
    cut = make_report(
        whole._replace(device=[span._replace(correlation=0) for span in whole.device])
    )
    full = make_report(whole)
    assert [step.launch for step in cut.steps.steps] == [step.launch for step in full.steps.steps]
    assert cut.waited_us.get("commit") == full.waited_us.get("commit")
    assert [finding.kind for finding in cut.findings if finding.kind is FindingKind.OUT_COPY] == [
        finding.kind for finding in full.findings if finding.kind is FindingKind.OUT_COPY
    ]
