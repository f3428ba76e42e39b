"""Bubbles planted into records as torch.profiler gives them on a GPU: each is found and named."""

from __future__ import annotations

import pytest

from photon_ext.observe.analysis.gaps import Cause, GapKind
from photon_ext.observe.analysis.host import CallCost
from photon_ext.observe.analysis.report import Report, make_report
from tests.observe.kineto_records import COMPUTE, IN, LINEAR, Document, Loop, records_of, user_loop

ITEM = "cudaStreamSynchronize, aten::item in decode one token"


def report_of(loop: Loop) -> Report:
    return make_report(loop.records())


def calls(report: Report, cause: Cause) -> list[CallCost]:
    return [cost for cost in report.calls if cost.cause is cause]


@pytest.mark.parametrize("mask_us", [None, 300])
def test_a_clean_pipeline_waits_for_nobody(mask_us: float | None) -> None:
    """Masks that are made underneath the forward cost nothing either."""
    report = report_of(Loop(depth=2, mask_us=mask_us))
    assert (report.calls, report.late_copies) == ([], None)
    assert set(report.waited_us) <= {"start of queued work"}
    assert report.active == pytest.approx(1.0, abs=3e-3)
    assert report.step_gap is not None
    assert (report.step_gap.steps, report.step_gap.max_us) == (10, 0)


@pytest.mark.parametrize(("depth", "waited"), [(1, 320), (2, 0)])
def test_a_sleep_in_commit_is_named_where_the_device_waits_for_it(depth: int, waited: int) -> None:
    """300 us more in commit: at depth 1 the device waits for them, at depth 2 they run underneath
    the next step."""
    report = report_of(Loop(depth=depth, commit_us=320))
    assert report.waited_us.get("commit", 0) == pytest.approx(waited)
    if waited:
        assert next(iter(report.waited_us)) == "commit", "what costs most comes first"


def test_a_pageable_copy_in_the_mask_path_is_named() -> None:
    report = report_of(Loop(depth=2, mask_us=900, pageable=True))
    (copy,) = calls(report, Cause.PAGEABLE)
    assert (copy.calls, copy.where) == (12, "mask: aten::copy_")
    assert "pageable copy: cudaMemcpyAsync in mask: aten::copy_" in report.text()
    assert report.waited_us["pageable copy (mask: aten::copy_)"] == pytest.approx(200)
    assert report.waited_us["mask"] < 60  # what is left of the masks when the forward is done


def test_masks_that_take_longer_than_the_forward_are_only_masks() -> None:
    report = report_of(Loop(depth=2, mask_us=1100))
    assert calls(report, Cause.PAGEABLE) == []
    assert next(iter(report.waited_us)) == "mask"
    assert {gap.kind for gap in report.gaps if gap.ns > 100_000} == {GapKind.SPLIT}
    assert report.split_gap is not None
    assert report.split_gap.median_us > 200


def test_an_item_in_user_code_is_named() -> None:
    """A stock loop: kernels launched one by one, then argmax, then .item(), which waits for the
    device. No phases of ours."""
    report = make_report(user_loop(items=1))
    (sync,) = calls(report, Cause.SYNC)
    assert (sync.calls, sync.where) == (10, "aten::item in decode one token")
    assert report.method == "the period of the kernel sequence"
    assert f"synchronizing call ({ITEM})" in report.waited_us


def test_causes_add_up_to_the_gap() -> None:
    """A quick wake-up and little Python: no cause is long, and still the device idles."""
    report = make_report(user_loop(items=1, wake_us=2, python_us=4))
    assert report.step_gap is not None
    assert sum(report.waited_us.values()) == pytest.approx(report.step_gap.median_us)
    assert len(report.waited_us) > 4


@pytest.mark.parametrize(
    ("name", "cause"),
    [("cudaEventSynchronize", Cause.SYNC), ("cudaMalloc", Cause.ALLOCATION)],
)
def test_a_call_in_the_commit_that_blocks_or_allocates_is_named(name: str, cause: Cause) -> None:
    """The commit's own wait is none of them (I7)."""
    loop = Loop(depth=2)
    at = loop.commits[3].time / 1e3
    loop.document.call(name, at - 12, at - 4)
    loop.document.op("aten::empty", at - 13, at - 3)
    (found,) = make_report(loop.records()).calls
    assert found == (cause, name, "commit: aten::empty", 1, 8.0)


def test_an_out_copy_behind_the_next_forward_is_named() -> None:
    report = report_of(Loop(depth=2, late_copy=True))
    assert report.late_copies is not None
    assert report.late_copies.copies >= 10
    assert report.late_copies.us == pytest.approx(1000, rel=0.1)  # a whole step late
    assert "ran behind the next step" in report.text()


def test_zombies_are_counted_and_their_steps_timed() -> None:
    report = report_of(Loop(depth=2, zombies=(4, 7)))
    assert report.zombies == (12, 2, 2, pytest.approx(240))  # the dead linear returns at once
    assert "zombies: 2 of 12 rows; 2 steps had no other rows and took 240 us" in report.text()
    assert [excluded.why for excluded in report.excluded].count("zombies only") == 2


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
    waited = make_report(records_of(document)).waited_us
    assert waited["copy to the device (HtoD Pinned -> Device)"] == pytest.approx(80)
    assert waited["start of queued work"] == pytest.approx(20)


@pytest.mark.parametrize("depth", [1, 2])
def test_records_without_the_launch_they_came_from_say_the_same(depth: int) -> None:
    """Some profilers leave a graph's kernels without a correlation: steps are matched with their
    launches by order."""
    whole = Loop(depth=depth, commit_us=320, late_copy=depth == 2).records()
    bare = [span._replace(correlation=0) for span in whole.device]
    cut, full = make_report(whole._replace(device=bare)), make_report(whole)
    assert [step.launch for step in cut.steps.steps] == [step.launch for step in full.steps.steps]
    assert cut.waited_us.get("commit") == full.waited_us.get("commit")
    assert (cut.late_copies is None) == (full.late_copies is None) == (depth == 1)
