"""The command line in a process of its own: what a terminal, a pipe or a script sees. Where the
test is not about how a process begins, it is one that has torch already.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment, save_with_words
from tests.forked import run_script

# What is done to a process's streams before it begins.
STREAMS = {
    "": "",
    "2>&1": "os.dup2(1, 2)",
    "> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "2> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "2>&-": "os.close(2); sys.stderr = None",
}


def generate(*arguments: str) -> list[str]:
    return ["generate", *arguments, "--device", "cpu"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "photon_ext", *generate(*arguments)]


def forked(arguments: list[str], streams: str) -> subprocess.CompletedProcess[str]:
    """The command in a fork that has torch, with its streams as a shell sends them somewhere."""
    return run_script(f"""
import os, sys
{STREAMS[streams]}
from photon_ext.cli import main
sys.exit(main({arguments}))
""")


def test_the_summary_has_a_line_of_its_own_where_both_streams_are_one_pipe(model: str) -> None:
    line = generate("w5 w6", "--model", model, "--max-new-tokens", "5")
    done = forked(line, "2>&1")
    text, summary = done.stdout.splitlines()
    assert done.returncode == 0
    assert text.startswith("w")
    assert summary.startswith("[5 tokens (")


def test_the_meters_last_line_is_one_of_its_own_where_both_streams_are_one_pipe(model: str) -> None:
    line = generate("w5 w6", "--model", model, "--max-new-tokens", "5", "--meter")
    done = forked(line, "2>&1")
    assert done.returncode == 0
    assert [text[:8] for text in done.stdout.splitlines()[-2:]] == ["[meter] ", "[5 token"]


def test_an_output_that_lacks_a_character_shows_a_question_mark(tmp_path: Path) -> None:
    save_with_words(tmp_path, "\u00e4")
    line = command("\u00e45 \u00e46", "--model", str(tmp_path), "--max-new-tokens", "5", "--raw")
    done = subprocess.run(
        line,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?")


@pytest.mark.parametrize("when", ["while it is imported", "while it runs"])
def test_ctrl_c_says_so_in_one_line(model: str, when: str) -> None:
    """The signal comes from within, at a known place."""
    program = f"""
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "photon_ext.engine" and {when == "while it is imported"}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from photon_ext import cli
def stream(request):
    next(request.iter())
    os.kill(os.getpid(), signal.SIGINT)
if {when == "while it runs"}:
    from photon_ext.cli import generate
    generate.stream = stream
arguments = ["generate", "w5", "--model", {model!r}, "--device", "cpu"]
sys.exit(cli.main([*arguments, "--max-new-tokens", "200"]))
"""
    done = run_script(program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def shell(line: list[str], streams: str) -> subprocess.CompletedProcess[str]:
    """A command with its streams as a shell sends them somewhere."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {streams}', "bash", *line],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("what", ["generate", "generate --json", "info", "--help"])
def test_a_full_disk_is_told_in_one_line(model: str, what: str) -> None:
    words = what.split()
    options = (
        ["w5 w6", "--model", model, "--device", "cpu", "--max-new-tokens", "5"]
        if "generate" in words
        else []
    )
    if what == "--help":  # needs no torch
        done = shell([sys.executable, "-m", "photon_ext", what], "> /dev/full")
    else:
        done = forked([words[0], *options, *words[1:]], "> /dev/full")
    name = "photon-ext" if what == "--help" else f"photon-ext {words[0]}"
    told = (
        f"{name}: stdout cannot be written (No space left on device); send it to where there "
        "is "
        "room\n"
    )
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("option", "streams"), [("--raw", "2>&-"), ("--meter", "2>&-"), ("--meter", "2> /dev/full")]
)
def test_without_a_stderr_there_is_the_text_alone(model: str, streams: str, option: str) -> None:
    done = forked(generate("w5 w6", "--model", model, "--max-new-tokens", "5", option), streams)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"w\d+( w\d+){4}\n", done.stdout)


def test_without_a_stderr_mistakes_are_told_nowhere_else(model: str) -> None:
    done = forked(generate("w5", "--model", model, "--depth", "3"), "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_stdout_that_is_closed_is_told_before_any_work() -> None:
    done = shell(command("w5", "--model", "/nowhere"), ">&-")
    assert (done.returncode, done.stderr) == (
        2,
        "photon-ext: stdout is closed; open it, or send it to /dev/null\n",
    )
