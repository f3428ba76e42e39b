"""The meter for people: a table in a terminal, lines elsewhere; `photon-ext generate --meter`."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from photon_ext.observe.live import PlainView, RichView, open_view, rows
from photon_ext.sampling import SamplingParams
from tests.forked import run_script
from tests.observe.test_meter import scripted

LINE = re.compile(
    r"\[meter\] [\d.]+ tokens/s, [\d.]+ steps/s, gap (-|[\d.]+ us), zombies [\d.]+%, .* "
    r"rows \d+/4, pages \d+/64, waiting 0"
)


class Terminal(io.StringIO):
    """What rich takes for one."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_a_line_at_the_end() -> None:
    stream = io.StringIO()
    with scripted() as engine:
        with open_view(engine.meter, stream) as view:
            assert not view.redraws
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
        view.close()
    (line,) = stream.getvalue().splitlines()
    assert LINE.fullmatch(line)


def test_lines_come_while_it_runs() -> None:
    stream = io.StringIO()
    with scripted() as engine, PlainView(engine.meter, stream, interval_s=0.01):
        deadline = time.monotonic() + 60
        while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert all(LINE.fullmatch(line) for line in stream.getvalue().splitlines())
    assert stream.getvalue().count("\n") >= 4


def test_a_stream_that_is_closed_ends_the_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    with scripted() as engine, PlainView(engine.meter, stream, interval_s=0.005):
        stream.close()
        time.sleep(0.05)
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
    assert len(output.token_ids) == 5


def test_a_terminal_shows_the_text_and_a_table_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")  # on "dumb", which editors name, rich redraws nothing
    stream = Terminal()
    with scripted() as engine, open_view(engine.meter, stream) as view:
        assert isinstance(view, RichView)
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
        view.show("once upon a time")
        view._live.refresh()
        assert "once upon a time" in stream.getvalue()
        before = len(stream.getvalue())
        view.close()
        last = stream.getvalue()[before:]
    assert "once upon" not in last
    assert "5 tokens in 5 steps" in last
    assert "0 of 4 (0%); 0 requests wait" in last
    for name in ("speed", "step gap", "zombies", "pages"):
        assert name in last


def test_a_long_text_leaves_room_for_the_table() -> None:
    pytest.importorskip("rich")
    with scripted() as engine, open_view(engine.meter, Terminal()) as view:
        assert isinstance(view, RichView)
        view.show("word " * 5000)
        group = view._render()
        assert len(group.renderables) <= 13  # type: ignore[union-attr]


def test_every_row_has_a_name_and_words() -> None:
    with scripted() as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
        shown = rows(engine.meter.snapshot())
    assert len({name for name, _ in shown}) == len(shown) >= 9
    assert ("step gap", "not measured") in shown
    assert all(value for _, value in shown)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`photon-ext generate --meter` with a tiny model."""
    for package in ("transformers", "tokenizers", "rich"):
        pytest.importorskip(package)
    from tests.cli.command import save_with_words

    folder: Path = tmp_path_factory.mktemp("tiny")
    save_with_words(folder, "w")
    options = f"--meter --model {folder} --device cpu --max-new-tokens 7".split()
    return ["generate", "w5 w6 w7", *options]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return run_script(f"import sys; from photon_ext.cli import main; sys.exit(main({command}))")


@pytest.fixture(scope="module")
def plain(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The same without a meter."""
    return run([part for part in command if part != "--meter"])


def test_the_command_prints_lines_to_stderr_and_text_alone_to_stdout(
    command: list[str], plain: subprocess.CompletedProcess[str]
) -> None:
    metered = run(command)
    assert metered.returncode == plain.returncode == 0
    assert metered.stdout == plain.stdout
    assert "[meter] " in metered.stderr
    assert "[meter] " not in plain.stderr


def test_in_a_terminal_the_text_stands_under_the_table_at_the_end(
    command: list[str], plain: subprocess.CompletedProcess[str]
) -> None:
    text = plain.stdout.strip()
    primary, secondary = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "photon_ext", *command],
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
        close_fds=True,
    )
    os.close(secondary)
    shown = b""
    try:
        while part := os.read(primary, 4096):
            shown += part
    except OSError:  # how a terminal ends on Linux
        pass
    os.close(primary)
    assert running.wait(timeout=120) == 0
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "tokens/s" in screen
    assert "zombies" in screen
    last = screen[screen.rindex("host us a step") :]
    assert text in last.replace("\r\n", "\n")
