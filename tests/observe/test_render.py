"""What is drawn: Perfetto's JSON by its format, the PNG by its pixels, the HTML in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from photon_ext.observe.analysis.report import Report, make_report
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import COLOURS, IDLE, make_lanes
from photon_ext.observe.render.page import page
from photon_ext.observe.render.perfetto import trace_events
from photon_ext.observe.render.save import has_matplotlib, save
from tests.observe import browser
from tests.observe.kineto_records import LINEAR, Loop, user_loop

EMPTY = Records(None, 0, 1000)


@pytest.fixture(scope="module")
def blocking() -> tuple[Records, Report]:
    """Twelve steps at depth 1, each followed by a gap."""
    records = Loop(depth=1, commit_us=150).records()
    return records, make_report(records)


def events_of(records: Records, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace_events(records, make_report(records))["traceEvents"] if event["ph"] == phase]


def test_every_event_has_what_the_format_asks_for(blocking: tuple[Records, Report]) -> None:
    document = json.loads(json.dumps(trace_events(*blocking)))
    assert set(document) >= {"traceEvents", "displayTimeUnit"}
    for event in document["traceEvents"]:
        assert set(event) >= {"ph", "pid", "tid", "name"}
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
        else:
            assert event["ph"] == "M"


def test_every_track_has_a_name_and_events_of_one_track_nest(blocking: tuple[Records, Report]) -> None:
    """Perfetto drops what overlaps without nesting."""
    records, _ = blocking
    named = {(event["pid"], event["tid"]) for event in events_of(records, "M") if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events_of(records, "M") if event["name"] == "process_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(records, "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert {process for process, _ in tracks} <= processes
    assert {track for track in tracks if track[0] != 2} <= named
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_idle_time_is_an_event_that_says_whom_the_device_waited_for(blocking: tuple[Records, Report]) -> None:
    idle = [event for event in events_of(blocking[0], "X") if event["cat"] == "idle"]
    assert len(idle) == 11
    assert all("commit 150.0 us" in event["args"]["waited for"] for event in idle)


def test_lanes_do_not_overlap_and_use_known_colours(blocking: tuple[Records, Report]) -> None:
    for records in (blocking[0], Loop(depth=2, mask_us=1100, pageable=True).records(), user_loop(items=1)):
        lanes = make_lanes(records, make_report(records))
        assert lanes
        for lane in lanes:
            assert all(box.colour in COLOURS for box in lane.boxes)
            assert all(before.end <= after.start for before, after in zip(lane.boxes, lane.boxes[1:], strict=False)), lane.name


def test_slots_take_turns_in_colour() -> None:
    records = Loop(depth=2).records()
    steps = next(lane for lane in make_lanes(records, make_report(records)) if lane.name == "device: steps")
    assert [box.colour for box in steps.boxes if box.colour != IDLE][:4] == ["slot A", "slot B"] * 2


def test_nothing_recorded_can_be_saved_too(tmp_path: Path) -> None:
    written = save(EMPTY, make_report(EMPTY), tmp_path)
    assert len(written) == 4 + has_matplotlib()
    assert "no steps were found" in (tmp_path / "summary.txt").read_text()


# --- PNG -------------------------------------------------------------------------------------------------------------------------------


def test_the_picture_shows_slots_and_idle_in_their_colours(blocking: tuple[Records, Report], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the PNG: pip install 'photon_ext[trace]'")
    from matplotlib.image import imread

    save(*blocking, tmp_path)
    pixels = (imread(str(tmp_path / "timeline.png"))[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert width == 1400
    assert 500 < height < 1600

    def share(colour: str) -> float:
        wanted = [int(COLOURS[colour][place : place + 2], 16) for place in (1, 3, 5)]
        return float((abs(pixels - wanted).max(axis=2) <= 2).mean())

    assert share("slot A") > 0.01
    assert share(IDLE) > 0.01
    assert share("commit") > 0.001


# --- HTML ------------------------------------------------------------------------------------------------------------------------------


class References(HTMLParser):
    """Everything that a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action") or tag in ("link", "iframe")]


def test_the_page_loads_nothing_and_stays_small(blocking: tuple[Records, Report]) -> None:
    text = page(*blocking)
    assert References(text).found == []
    assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest", text)
    assert len(text) < 60_000
    many = Loop(depth=2, steps=2000).records()
    assert len(page(many, make_report(many))) < 1_500_000


def test_a_kernel_name_cannot_break_the_page() -> None:
    loop = Loop(depth=1, steps=5)
    for event in loop.document.events:
        event["name"] = event["name"].replace(LINEAR, "evil</script><script>alert(1)</script>(int)")
    records = loop.records()
    text = page(records, make_report(records))
    assert text.count("</script>") == 2
    assert "alert(1)" in text  # as text


@pytest.mark.skipif(browser.PATH is None, reason="no chromium on this machine (Debian: apt install chromium)")
def test_zoom_move_hover_and_the_step_list_work_in_a_browser(blocking: tuple[Records, Report], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(*blocking))
    records, report = blocking
    step = report.steps.steps[3]
    start, end, whole = ((time - records.start) / 1e3 for time in (step.start, step.end, records.end))

    with browser.Page(file, tmp_path / "profile") as shown:
        left, top, width = shown.evaluate("(r => [r.left, r.top, r.width])(canvas.getBoundingClientRect())")
        lane = shown.evaluate("data.lanes.findIndex(lane => lane.name === 'device: steps')")
        y = top + (lane + 0.5) * shown.evaluate("ROW")

        def view() -> tuple[float, float]:
            first, last = shown.evaluate("[view.from, view.to]")
            return first, last

        def x_of(time: float) -> float:
            return left + float(shown.evaluate(f"xOf({time})"))

        def hover(x: float, y: float) -> str:
            shown.mouse("mouseMoved", x, y)
            return str(shown.evaluate("tip.style.display === 'block' ? tip.textContent : ''"))

        first = view()
        assert first[1] - first[0] < whole  # the middle steps, at first
        shown.evaluate("show(0, whole.to)")
        under = whole / 3
        shown.mouse("mouseWheel", round(x_of(under)), y, deltaX=0, deltaY=-600)
        zoomed = view()
        assert zoomed[1] - zoomed[0] == pytest.approx(whole * 0.4066, rel=0.01)  # exp(-0.9)
        assert x_of(under) == pytest.approx(left + 170 + (width - 170) / 3, abs=2)  # what was under the pointer is still there

        shown.mouse("mousePressed", left + 600, y, button="left", clickCount=1)
        shown.mouse("mouseMoved", left + 500, y, button="left", buttons=1)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=1)
        moved = view()
        assert moved[0] - zoomed[0] == pytest.approx(100 / (width - 170) * (zoomed[1] - zoomed[0]), rel=0.02)

        shown.evaluate("rows.rows[3].click()")
        over_step, over_gap = hover(x_of((start + end) / 2), y), hover(x_of(start - 50), y)
        chosen = view()
        assert chosen[0] < start < end < chosen[1]
        assert shown.evaluate("location.hash") == "#" + ",".join(f"{edge:.3f}" for edge in chosen)
        assert over_step.startswith("step 3: 1.000 ms")
        assert over_gap.startswith("step gap: ")
        assert "commit 150.0 us" in over_gap
        assert hover(left + 400, top + shown.evaluate("data.lanes.length * ROW") + 8) == ""  # the axis

        shown.mouse("mousePressed", left + 500, y, button="left", clickCount=1)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=1)
        shown.mouse("mousePressed", left + 500, y, button="left", clickCount=2)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=2)
        assert view() == (0, pytest.approx(whole))
        row = f"context.getImageData(172, ({lane} + 0.5) * ROW, canvas.width - 180, 1).data"
        colours = shown.evaluate(f"[...new Set([...Array({int(width) - 180}).keys()].map(i => [...{row}.slice(4 * i, 4 * i + 3)].join()))]")
        assert {",".join(str(int(COLOURS[name][place : place + 2], 16)) for place in (1, 3, 5)) for name in ("slot A", IDLE)} <= set(
            colours
        )
        assert shown.errors == []
