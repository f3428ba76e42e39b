"""The meter for people: a table that redraws itself in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, TextIO

from photon_ext.observe.meter import Meter, MeterSnapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAWS_PER_S = 4
LINE_INTERVAL_S = 1.0
SHOWN_LINES = 12  # of the text above the table: what does not fit could not be redrawn
SHOWN_CHARACTERS = 2000


class View(Protocol):
    """Shows a meter from its making to `close`, on a thread of its own. A context manager.

    Attributes:
        redraws: it moves the cursor: nothing else may be printed to its terminal before `close`.
    """

    redraws: bool

    def __enter__(self) -> View:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def show(self, text: str) -> None:
        """Adds to the text shown above the table, where the view redraws."""
        return

    def close(self) -> None:
        """Shows the last state and stops. Idempotent."""
        return


def open_view(meter: Meter, stream: TextIO) -> View:
    """A table on a terminal where `rich` is installed (extra `engine`); elsewhere a line per
    second, and one at the end."""
    if stream.isatty():
        try:
            return RichView(meter, stream)
        except ImportError:  # the lines say as much
            pass
    return PlainView(meter, stream)


class PlainView(View):
    """A line per interval, whatever the stream."""

    redraws = False

    def __init__(self, meter: Meter, stream: TextIO, interval_s: float = LINE_INTERVAL_S) -> None:
        self._meter, self._stream, self._interval_s = meter, stream, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="photon-meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See View.close."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._print()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._print()

    def _print(self) -> None:
        try:
            print(line(self._meter.snapshot()), file=self._stream, flush=True)
        except (OSError, ValueError):  # nobody reads it: no reason to end what is metered
            self._closed.set()


class RichView(View):
    """A table under the latest text, redrawn in place; after `close` the table alone stays."""

    redraws = True

    def __init__(self, meter: Meter, stream: TextIO) -> None:
        """Raises ImportError without `rich`."""
        from rich.console import Console
        from rich.live import Live

        self._meter = meter
        self._text = ""
        self._console = Console(file=stream)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REDRAWS_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def show(self, text: str) -> None:
        """See View.show."""
        self._text = (self._text + text)[-SHOWN_CHARACTERS:]

    def close(self) -> None:
        """See View.close."""
        self._text = ""
        self._live.stop()  # draws once more

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False, title="photon_ext", title_justify="left", expand=False)
        table.add_column(style="dim")
        table.add_column()
        for name, value in rows(self._meter.snapshot()):
            table.add_row(name, value)
        text = Text(self._text).wrap(self._console, max(20, self._console.width))
        return Group(*text[-SHOWN_LINES:], table)


def rows(now: MeterSnapshot) -> list[tuple[str, str]]:
    """What a snapshot says, as (name, value)."""
    gap = f"{now.step_gap_us or 0:.1f} us (median), {now.step_gap_p99_us or 0:.1f} us (99 %)"
    speed = f"{now.tokens_per_s:.1f} tokens/s, {now.steps_per_s:.1f} steps/s"
    zombies = f"{now.zombie_rows} of {now.committed_rows} rows ({now.zombie_share:.2%})"
    pages = f"{now.pages_held} of {now.pages} ({now.page_occupancy:.0%})"
    held = f"{now.rows_held} of {now.rows_max} ({now.row_occupancy:.0%})"
    return [
        ("where", f"{now.device}, depth {now.depth}"),
        ("speed", f"{speed}, {now.rows_per_step:.1f} rows a step"),
        ("so far", f"{now.tokens} tokens in {now.steps} steps, {now.quiet_steps} of them quiet"),
        ("step gap", "not measured" if now.step_gap_us is None else gap),
        ("device waited", f"{now.device_waits} of {now.steps} launches"),
        ("host waited", f"{now.host_waits} of {now.steps} commits, {now.host_wait_s:.2f} s"),
        ("zombies", f"{zombies}, {now.zombie_steps} steps of nothing else"),
        ("rows", f"{held}; {now.waiting} requests wait"),
        ("pages", pages),
        ("host us a step", ", ".join(f"{phase} {us:.0f}" for phase, us in now.host_us.items())),
    ]


def line(now: MeterSnapshot) -> str:
    """A snapshot in one line."""
    gap = "-" if now.step_gap_us is None else f"{now.step_gap_us:.1f} us"
    return (
        f"[meter] {now.tokens_per_s:.1f} tokens/s, {now.steps_per_s:.1f} steps/s, gap {gap}, "
        f"zombies {now.zombie_share:.2%}, device waited {now.device_waits}, host waited "
        f"{now.host_waits} of {now.steps}, rows {now.rows_held}/{now.rows_max}, "
        f"pages {now.pages_held}/{now.pages}, waiting {now.waiting}"
    )
