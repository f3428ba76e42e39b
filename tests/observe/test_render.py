"""What is drawn: Perfetto's JSON by its format, the PNG by its pixels, the HTML in a browser."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from photon_ext.observe.analysis.report import Report, make_report
from photon_ext.observe.analysis.steps import Numbers
from photon_ext.observe.records import Op, OpKind, Records
from photon_ext.observe.render.lanes import COLOURS, IDLE, TURNS, luminance, make_lanes, takes_white
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
    return [
        event
        for event in trace_events(records, make_report(records))["traceEvents"]
        if event["ph"] == phase
    ]


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


def test_every_track_has_a_name_and_events_of_one_track_nest(
    blocking: tuple[Records, Report],
) -> None:
    """Perfetto drops what overlaps without nesting."""
    records, _ = blocking
    named = {
        (event["pid"], event["tid"])
        for event in events_of(records, "M")
        if event["name"] == "thread_name"
    }
    processes = {
        event["pid"] for event in events_of(records, "M") if event["name"] == "process_name"
    }
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(records, "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append(
            (event["ts"], event["ts"] + event["dur"])
        )
    assert {process for process, _ in tracks} <= processes
    assert {track for track in tracks if track[0] != 2} <= named
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_idle_time_is_an_event_that_says_whom_the_device_waited_for(
    blocking: tuple[Records, Report],
) -> None:
    idle = [event for event in events_of(blocking[0], "X") if event["cat"] == "idle"]
    assert len(idle) == 11
    assert all("commit 150.0 us" in event["args"]["waited for"] for event in idle)


def test_lanes_do_not_overlap_and_use_known_colours(blocking: tuple[Records, Report]) -> None:
    for records in (
        blocking[0],
        Loop(depth=2, mask_us=1100, pageable=True).records(),
        user_loop(items=1),
    ):
        lanes = make_lanes(records, make_report(records))
        assert lanes
        for lane in lanes:
            assert all(box.colour in COLOURS for box in lane.boxes)
            assert all(
                before.end <= after.start
                for before, after in zip(lane.boxes, lane.boxes[1:], strict=False)
            ), lane.name


def test_every_file_gives_a_step_the_same_number() -> None:
    """A recording after a warm-up of eight steps, and one that begins with a step in flight:
    both count from 0.
    """
    loop = Loop(depth=2)
    loop.launches = [launch._replace(step=launch.step + 8) for launch in loop.launches]
    loop.host = [
        span if span.step is None else span._replace(step=span.step + 8) for span in loop.host
    ]
    loop.commits = [commit._replace(step=commit.step + 8) for commit in loop.commits]
    records = loop.records()
    for recorded in (records, records._replace(launches=records.launches[1:])):
        report = make_report(recorded)
        listed = [
            step["title"]
            for step in json.loads(
                page(recorded, report).split('type="application/json">')[1].split("</script>")[0]
            )["steps"]
        ]
        lane = next(lane for lane in make_lanes(recorded, report) if lane.name == "device: steps")
        traced = [event["name"] for event in events_of(recorded, "X") if event["cat"] == "step"]
        drawn = [box.title for box in lane.boxes if box.colour != IDLE]
        assert listed == drawn == traced == [f"step {number}" for number in range(12)]
        assert [number for number, *_ in report.excluded] == [0, 11]
        waits = [
            event["args"]["step"] for event in events_of(recorded, "X") if event["name"] == "wait"
        ]
        host = next(
            lane for lane in make_lanes(recorded, report) if lane.name == "host: photon-engine"
        )
        assert waits == list(range(12))
        assert [box.text for box in host.boxes if box.title == "wait"] == [
            f"step {number}" for number in range(12)
        ]


def test_two_pipelines_in_one_recording_share_no_number() -> None:
    steps = make_report(Loop(depth=1, steps=8).records()).steps.steps
    again = [
        step._replace(launch=step.launch and step.launch._replace(step=step.number % 4))
        for step in steps
    ]
    numbers = Numbers(again)
    assert [numbers.at(step.number % 4, step.end) for step in steps] == list(range(8))
    assert numbers.at(4, steps[0].end) is None


# --- colours --------------------------------------------------------------------------------------

LANES = (
    ("plan", "launch", "wait", "commit", "mask", "finalize", "deliver", "collect"),
    ("slot A", "slot B", "prefill", IDLE),
    ("carry-over", "forward", "prefill chunk", "sampling"),
)
# Machado, Oliveira, Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision
# Deficiency": severity 1, linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of "#RRGGBB"."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    red, green, blue = (
        min(1.0, max(0.0, sum(m * part for m, part in zip(row, linear, strict=True))))
        for row in SIGHTS[sight]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def apart(one: str, other: str, sights: Iterable[str] = SIGHTS) -> float:
    return min(
        math.dist(seen(COLOURS[one], sight), seen(COLOURS[other], sight)) for sight in sights
    )


def test_neighbours_in_a_lane_can_be_told_apart_with_colour_blindness_too() -> None:
    for lane in LANES:
        for one, other in combinations(lane, 2):
            assert apart(one, other) > 15, (one, other)
    for phase, step in product(LANES[2], LANES[1]):  # above each other
        assert apart(phase, step) > 12, (phase, step)


def test_no_two_entries_of_the_legend_look_alike_and_none_vanishes_on_white() -> None:
    # the slots' colours, where no slot is known
    names = [name for name in COLOURS if name not in TURNS]
    for one, other in combinations(names, 2):
        assert apart(one, other, ["all cones"]) > 13, (one, other)
    white = seen("#FFFFFF", "all cones")
    assert all(math.dist(seen(COLOURS[name], "all cones"), white) > 10 for name in names)


def test_names_in_boxes_can_be_read() -> None:
    for name, colour in COLOURS.items():
        light = luminance(colour)
        # WCAG 2.2's least contrast of large text
        assert (1.05 / (light + 0.05) if takes_white(name) else (light + 0.05) / 0.05) > 3, name


def test_slots_take_turns_in_colour() -> None:
    records = Loop(depth=2).records()
    steps = next(
        lane for lane in make_lanes(records, make_report(records)) if lane.name == "device: steps"
    )
    assert [box.colour for box in steps.boxes if box.colour != IDLE][:4] == ["slot A", "slot B"] * 2


def test_nothing_recorded_can_be_saved_too(tmp_path: Path) -> None:
    written = save(EMPTY, make_report(EMPTY), tmp_path)
    assert len(written) == 4 + has_matplotlib()
    assert "no steps were found" in (tmp_path / "summary.txt").read_text()


# --- PNG ------------------------------------------------------------------------------------------


def test_the_picture_shows_slots_and_idle_in_their_colours(
    blocking: tuple[Records, Report], tmp_path: Path
) -> None:
    pytest.importorskip(
        "matplotlib", reason="matplotlib draws the PNG: pip install 'photon_ext[trace]'"
    )
    from matplotlib.image import imread

    save(*blocking, tmp_path)
    pixels = (imread(str(tmp_path / "timeline.png"))[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert width == 1400
    assert 500 < height < 1600

    def share(colour: str) -> float:
        wanted = [int(COLOURS[colour][place : place + 2], 16) for place in (1, 3, 5)]
        return float((abs(pixels - wanted).max(axis=2) <= 2).mean())

    assert (pixels[:, :5] == 255).all(), "no label touches the left edge"
    assert share("slot A") > 0.01
    assert share(IDLE) > 0.01
    assert share("commit") > 0.001


@pytest.mark.parametrize("name", ["$\\frac{$", "$x_$", "half of a pair: \udcff", "long " * 200])
def test_a_name_cannot_break_the_picture(name: str, tmp_path: Path) -> None:
    """Neither that of a range nor that of a thread: both are drawn as they are, not as formulas."""
    pytest.importorskip(
        "matplotlib", reason="matplotlib draws the PNG: pip install 'photon_ext[trace]'"
    )
    records = Records(
        None, 0, 1000, ops=[Op(name, OpKind.ANNOTATION, 0, 1000, 7)], threads={7: name}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tmp_path / "timeline.png" in save(records, make_report(records), tmp_path)


# --- HTML -----------------------------------------------------------------------------------------


class References(HTMLParser):
    """Everything that a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href", "action") or tag in ("link", "iframe")
        ]


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


@pytest.mark.skipif(
    browser.PATH is None, reason="no chromium on this machine (Debian: apt install chromium)"
)
def test_zoom_move_hover_and_the_step_list_work_in_a_browser(
    blocking: tuple[Records, Report], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(*blocking))
    records, report = blocking
    step = report.steps.steps[3]
    start, end, whole = (
        (time - records.start) / 1e3 for time in (step.start, step.end, records.end)
    )

    with browser.Page(file, tmp_path / "profile") as shown:
        left, top, width = shown.evaluate(
            "(r => [r.left, r.top, r.width])(canvas.getBoundingClientRect())"
        )
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

        assert view() == (0, pytest.approx(whole))  # everything, at first
        under = whole / 3
        shown.mouse("mouseWheel", round(x_of(under)), y, deltaX=0, deltaY=-600)
        zoomed = view()
        assert zoomed[1] - zoomed[0] == pytest.approx(whole * 0.4066, rel=0.01)  # exp(-0.9)
        # what was under the pointer is still there
        assert x_of(under) == pytest.approx(left + 170 + (width - 170) / 3, abs=2)

        shown.mouse("mousePressed", left + 600, y, button="left", clickCount=1)
        shown.mouse("mouseMoved", left + 500, y, button="left", buttons=1)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=1)
        moved = view()
        assert moved[0] - zoomed[0] == pytest.approx(
            100 / (width - 170) * (zoomed[1] - zoomed[0]), rel=0.02
        )

        shown.evaluate("rows.rows[3].click()")
        over_step, over_gap = hover(x_of((start + end) / 2), y), hover(x_of(start - 50), y)
        chosen = view()
        assert chosen[0] < start < end < chosen[1]
        assert shown.evaluate("location.hash") == "#" + ",".join(f"{edge:.3f}" for edge in chosen)
        assert over_step.startswith("step 3: 1.000 ms")
        assert over_gap.startswith("step gap: ")
        assert "commit 150.0 us" in over_gap
        # the axis
        assert hover(left + 400, top + shown.evaluate("data.lanes.length * ROW") + 8) == ""

        shown.mouse("mousePressed", left + 500, y, button="left", clickCount=1)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=1)
        shown.mouse("mousePressed", left + 500, y, button="left", clickCount=2)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=2)
        assert view() == (0, pytest.approx(whole))
        row = f"context.getImageData(172, ({lane} + 0.5) * ROW, canvas.width - 180, 1).data"
        colours = shown.evaluate(
            f"[...new Set([...Array({int(width) - 180}).keys()].map(i => [...{row}.slice(4 * i, 4 "
            "* i + 3)].join()))]"
        )
        assert {
            ",".join(str(int(COLOURS[name][place : place + 2], 16)) for place in (1, 3, 5))
            for name in ("slot A", IDLE)
        } <= set(colours)
        assert shown.errors == []


@pytest.mark.skipif(
    browser.PATH is None, reason="no chromium on this machine (Debian: apt install chromium)"
)
def test_nothing_is_cut_at_any_width_and_the_strip_on_top_moves_the_view(
    blocking: tuple[Records, Report], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(*blocking))
    with browser.Page(file, tmp_path / "profile") as shown:
        for width in (800, 1280, 1400, 1700):
            shown.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=1000,
                deviceScaleFactor=1,
                mobile=False,
            )
            shown.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            for part in ("summary", "list"):
                inside = (
                    "(e => e.scrollWidth <= e.clientWidth && e.clientHeight > "
                    f"100)(document.getElementById('{part}'))"
                )
                assert shown.evaluate(inside), (width, part)
        shown.evaluate("rows.rows[3].click()")
        before = shown.evaluate("[view.from, view.to]")
        left, top, width = shown.evaluate(
            "(r => [r.left, r.top, r.width])(overview.getBoundingClientRect())"
        )
        shown.mouse(
            "mousePressed",
            round(left + 170 + 0.75 * (width - 170)),
            top + 20,
            button="left",
            clickCount=1,
        )
        shown.mouse(
            "mouseReleased",
            round(left + 170 + 0.75 * (width - 170)),
            top + 20,
            button="left",
            clickCount=1,
        )
        after = shown.evaluate("[view.from, view.to]")
        assert after[1] - after[0] == pytest.approx(before[1] - before[0])
        assert sum(after) / 2 == pytest.approx(0.75 * shown.evaluate("whole.to"), rel=0.01)
        # the gaps are longer than a bin
        assert max(shown.evaluate("[...idleShare]")) == pytest.approx(1.0)
        assert shown.errors == []
