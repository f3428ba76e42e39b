"""What is drawn: Perfetto's JSON by its format, the PNG by its pixels, the HTML in a browser."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from photon_ext.observe.analysis.report import Report, make_report
from photon_ext.observe.records import DeviceKind, DeviceSpan, Op, OpKind, Records
from photon_ext.observe.render.lanes import (
    COLOURS,
    DESCHEDULED,
    IDLE,
    LEGEND,
    TURNS,
    WHITE,
    make_lanes,
)
from photon_ext.observe.render.page import page
from photon_ext.observe.render.perfetto import trace_events
from photon_ext.observe.render.save import has_matplotlib, save
from tests.observe import browser
from tests.observe.kineto_records import LINEAR, Loop, user_loop

EMPTY = Records(None, 0, 1000)
needs_chromium = pytest.mark.skipif(browser.PATH is None, reason="apt install chromium")
needs_matplotlib = pytest.mark.skipif(
    not has_matplotlib(), reason="matplotlib draws the PNG: pip install matplotlib"
)


@pytest.fixture(scope="module")
def blocking() -> tuple[Records, Report]:
    """Twelve steps at depth 1, each followed by a gap."""
    records = Loop(depth=1, commit_us=150).records()
    return records, make_report(records)


def events_of(records: Records, phase: str) -> list[dict[str, Any]]:
    events = trace_events(records, make_report(records))["traceEvents"]
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_what_the_format_asks_for(blocking: tuple[Records, Report]) -> None:
    document = json.loads(json.dumps(trace_events(*blocking)))
    assert set(document) >= {"traceEvents", "displayTimeUnit"}
    for event in document["traceEvents"]:
        assert set(event) >= {"ph", "pid", "tid", "name"}
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert min(event["ts"], event["dur"]) >= 0
            assert isinstance(event["args"], dict)


def test_every_track_has_a_name_and_its_events_nest(blocking: tuple[Records, Report]) -> None:
    """Perfetto drops what overlaps without nesting."""
    names = events_of(blocking[0], "M")
    named = {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(blocking[0], "X"):
        span = (event["ts"], event["ts"] + event["dur"])
        tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert {pid for pid, _ in tracks} <= {e["pid"] for e in names if e["name"] == "process_name"}
    assert {track for track in tracks if track[0] != 2} <= named
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_idle_time_says_whom_the_device_waited_for(blocking: tuple[Records, Report]) -> None:
    idle = [event for event in events_of(blocking[0], "X") if event["cat"] == "idle"]
    assert len(idle) == 11
    assert all("commit 150.0 us" in event["args"]["waited for"] for event in idle)


def test_lanes_do_not_overlap_and_use_known_colours(blocking: tuple[Records, Report]) -> None:
    constrained = Loop(depth=2, mask_us=1100, pageable=True).records()
    for records in (blocking[0], constrained, user_loop(items=1)):
        lanes = make_lanes(records, make_report(records))
        assert lanes
        for lane in lanes:
            assert all(box.colour in COLOURS for box in lane.boxes)
            assert all(a.end <= b.start for a, b in pairwise(lane.boxes)), lane.name


def test_every_file_gives_a_step_the_same_number() -> None:
    """A recording after a warm-up of eight steps, and one that begins with a step in flight."""
    loop = Loop(depth=2)
    loop.launches = [launch._replace(step=launch.step + 8) for launch in loop.launches]
    loop.host = [s if s.step is None else s._replace(step=s.step + 8) for s in loop.host]
    loop.commits = [commit._replace(step=commit.step + 8) for commit in loop.commits]
    whole = loop.records()
    for records in (whole, whole._replace(launches=whole.launches[1:])):
        report = make_report(records)
        lanes = {lane.name: lane.boxes for lane in make_lanes(records, report)}
        text = page(records, report).split('type="application/json">')[1].split("</script>")[0]
        listed = [step["title"] for step in json.loads(text)["steps"]]
        events = events_of(records, "X")
        traced = [event["name"] for event in events if event["cat"] == "step"]
        drawn = [box.title for box in lanes["device: steps"] if box.colour != IDLE]
        colours = [box.colour for box in lanes["device: steps"] if box.colour != IDLE]
        assert colours[2:6] == ["slot A", "slot B"] * 2
        assert listed == drawn == traced == [f"step {number}" for number in range(12)]
        assert [excluded.step for excluded in report.excluded] == [0, 11]
        waits = [event["args"]["step"] for event in events if event["name"] == "wait"]
        assert waits == list(range(12))
        shown = [box.text for box in lanes["host: photon-engine"] if box.title == "wait"]
        assert shown == [f"step {number}" for number in range(12)]


def test_a_descheduled_thread_is_drawn_as_what_it_is() -> None:
    kernel = DeviceSpan("linear", DeviceKind.KERNEL, 0, 100, 1)
    lost = DeviceSpan(DESCHEDULED, DeviceKind.DESCHEDULED, 100, 900, 1)
    records = Records("host", 0, 1000, device=[kernel, lost])
    (lane,) = make_lanes(records, make_report(records))
    assert [(box.start, box.end, box.title) for box in lane.boxes] == [
        (0, 100, "linear"),
        (100, 900, "descheduled"),
    ]
    assert lane.boxes[1].colour == DESCHEDULED


# --- colours -------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision
# Deficiency": severity 1, linear RGB.
SIGHTS = {
    "all cones": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "protanopia": (
        *(0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        *(0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        *(1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of "#RRGGBB"."""
    m, rgb = SIGHTS[sight], linear(colour)
    mixed = (sum(m[3 * row + k] * rgb[k] for k in range(3)) for row in range(3))
    red, green, blue = (min(1.0, max(0.0, part)) for part in mixed)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def apart(one: str, other: str, sights: Iterable[str] = SIGHTS) -> float:
    return min(math.dist(seen(one, sight), seen(other, sight)) for sight in sights)


def test_colours_of_a_legend_are_told_apart_with_colour_blindness_too() -> None:
    host = [COLOURS[name] for name in LEGEND["host"] if name != "torch op"]  # a lane of its own
    steps = [COLOURS[name] for name in ("slot A", "slot B", "prefill", IDLE, DESCHEDULED)]
    for one, other in (*combinations(host, 2), *combinations(steps, 2)):
        assert apart(one, other) > 13, (one, other)
    every = [COLOURS[name] for name in COLOURS if name not in TURNS]
    for one, other in combinations([*every, "#FFFFFF"], 2):
        assert apart(one, other, ["all cones"]) > 10, (one, other)


def test_names_in_boxes_can_be_read() -> None:
    for name, colour in COLOURS.items():
        red, green, blue = linear(colour)
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        contrast = 1.05 / (light + 0.05) if name in WHITE else (light + 0.05) / 0.05
        assert contrast > 3, name  # WCAG 2.2's least contrast of large text


# --- PNG -----------------------------------------------------------------------------------------


def test_nothing_recorded_can_be_saved_too(tmp_path: Path) -> None:
    written = save(EMPTY, make_report(EMPTY), tmp_path)
    assert len(written) == 4 + has_matplotlib()
    assert "no steps were found" in (tmp_path / "summary.txt").read_text()


@needs_matplotlib
def test_the_picture_shows_slots_and_idle_in_their_colours(
    blocking: tuple[Records, Report], tmp_path: Path
) -> None:
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
    assert (pixels[:, -5:] == 255).all(), "no legend is cut off at the right"
    assert share("slot A") > 0.01
    assert share(IDLE) > 0.01
    assert share("commit") > 0.001


@needs_matplotlib
def test_the_picture_has_a_legend_for_the_host_and_one_for_the_device(
    blocking: tuple[Records, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    from photon_ext.observe.render.picture import draw

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    draw(*blocking, tmp_path / "timeline.png")
    legends = [found for found in drawn[0].axes[0].get_children() if isinstance(found, Legend)]
    shown = {
        str(one.get_title().get_text()): [text.get_text() for text in one.get_texts()]
        for one in legends
    }
    assert shown == {
        "host": ["plan", "launch", "wait", "commit", "deliver"],
        "device": ["slot A", "slot B", "copy", IDLE],
    }


@needs_matplotlib
@pytest.mark.parametrize("name", ["$\\frac{$", "$x_$", "half of a pair: \udcff", "long " * 200])
def test_a_name_cannot_break_the_picture(name: str, tmp_path: Path) -> None:
    """Neither that of a range nor that of a thread: both are drawn as they are."""
    ops = [Op(name, OpKind.ANNOTATION, 0, 1000, 7)]
    records = Records(None, 0, 1000, ops=ops, threads={7: name})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tmp_path / "timeline.png" in save(records, make_report(records), tmp_path)


# --- HTML ----------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_stays_small(blocking: tuple[Records, Report]) -> None:
    text = page(*blocking)
    loads = r"\b(src|href|action)\s*=|<(link|iframe)\b|https?://|@import|fetch\(|XMLHttpRequest"
    assert not re.search(loads, text)
    assert len(text) < 60_000
    many = Loop(depth=2, steps=2000).records()
    assert len(page(many, make_report(many))) < 1_500_000


def test_a_kernel_name_cannot_break_the_page() -> None:
    loop = Loop(depth=1, steps=5)
    evil = "evil</script><script>alert(1)</script>(int)"
    for event in loop.document.events:
        event["name"] = event["name"].replace(LINEAR, evil)
    records = loop.records()
    text = page(records, make_report(records))
    assert text.count("</script>") == 2
    assert "alert(1)" in text  # as text


@needs_chromium
def test_zoom_move_hover_and_the_step_list_work_in_a_browser(
    blocking: tuple[Records, Report], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(*blocking))
    records, report = blocking
    step = report.steps.steps[3]
    times = (step.start, step.end, records.end)
    start, end, whole = ((time - records.start) / 1e3 for time in times)
    with browser.Page(file, tmp_path / "profile") as shown:
        place = "(r => [r.left, r.top, r.width])(canvas.getBoundingClientRect())"
        left, top, width = shown.evaluate(place)
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
        x = x_of(whole / 3)
        shown.mouse("mouseWheel", round(x), y, deltaX=0, deltaY=-600)
        zoomed = view()
        assert zoomed[1] - zoomed[0] == pytest.approx(whole * 0.4066, rel=0.01)  # exp(-0.9)
        assert x_of(whole / 3) == pytest.approx(x, abs=2)  # it is still under the pointer
        shown.mouse("mousePressed", left + 600, y, button="left", clickCount=1)
        shown.mouse("mouseMoved", left + 500, y, button="left", buttons=1)
        shown.mouse("mouseReleased", left + 500, y, button="left", clickCount=1)
        pixel = (zoomed[1] - zoomed[0]) / (width - 170)
        assert view()[0] - zoomed[0] == pytest.approx(100 * pixel, rel=0.02)

        shown.evaluate("rows.rows[3].click()")
        over_step, over_gap = hover(x_of((start + end) / 2), y), hover(x_of(start - 50), y)
        chosen = view()
        assert chosen[0] < start < end < chosen[1]
        address = "#" + ",".join(f"{edge:.3f}" for edge in chosen)
        assert shown.evaluate("location.hash") == address
        assert over_step.startswith("step 3: 1.000 ms")
        assert over_gap.startswith("step gap: ")
        assert "commit 150.0 us" in over_gap
        axis = top + shown.evaluate("data.lanes.length * ROW") + 8
        assert hover(left + 400, axis) == ""

        shown.click(left + 500, y)
        shown.click(left + 500, y, count=2)
        assert view() == (0, pytest.approx(whole))
        row = f"context.getImageData(172, ({lane} + 0.5) * ROW, canvas.width - 180, 1).data"
        pixels = shown.evaluate(f"[...{row}]")
        drawn = {tuple(pixels[k : k + 3]) for k in range(0, len(pixels), 4)}
        for name in ("slot A", IDLE):
            wanted = tuple(int(COLOURS[name][place : place + 2], 16) for place in (1, 3, 5))
            assert wanted in drawn, name
        assert shown.errors == []


@needs_chromium
def test_nothing_is_cut_at_any_width(blocking: tuple[Records, Report], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(*blocking))
    with browser.Page(file, tmp_path / "profile") as shown:
        titles = "[...document.querySelectorAll('#legend b')].map(title => title.textContent)"
        assert shown.evaluate(titles) == ["host:", "device:"]
        for width in (800, 1280, 1400, 1700):
            shown.resize(width)
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            for part in ("summary", "list"):
                inside = "(e => e.scrollWidth <= e.clientWidth && e.clientHeight > 100)"
                assert shown.evaluate(f"{inside}(find('{part}'))"), (width, part)
        assert shown.errors == []
