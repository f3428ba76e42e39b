"""`photon-ext bench`, against servers that do as a test says."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.bench.server import Reply, refused, serving, streamed, text_event
from tests.cli.command import run
from tests.serve.processes import is_alive, until

SHORT = "--model", "m", "--answer", "4", "--prompt", "3-9", "--clients", "2"


def four(body: dict[str, Any]) -> Reply:
    """As many tokens as asked, in two events; 0.1 s between."""
    first, *others = streamed(text_event("a b"), text_event("c d"), tokens=body["max_tokens"])
    return [first, others[0], 0.1, *others[1:]]


def test_runs_of_streams(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, plot = tmp_path / "found.json", tmp_path / "found.png"
    with serving(four) as url:
        files = "--json", str(found), "--plot", str(plot)
        code, out, err = run(capsys, "bench", url, *SHORT, "--streams", "1,3", *files)
    assert (code, err) == (0, "1 stream: 4 requests\n3 streams: 12 requests\n")
    assert "3 streams" in out
    one, three = json.loads(found.read_text())["runs"]
    assert (one["requests"], three["requests"]) == (4, 12)
    assert (one["tokens"], three["tokens"]) == (16, 48)
    assert one["failed"] == three["failed"] == {}
    assert one["tpot_ms"]["p50"] >= 50 / 3  # a busy machine may read the first event late
    assert one["gap_ms"]["p50"] >= 50
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_runs_by_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(four) as url:
        given = "--rate", "200,burst", "--requests", "20", "--chat"
        code, out, err = run(capsys, "bench", url + "/v1/", *SHORT, *given)
    assert (code, err) == (0, "200/s: 20 requests\nburst: 20 requests\n")
    assert "200/s" in out
    assert "burst" in out


def test_failures_and_short_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    number = count()

    def reply(body: dict[str, Any]) -> Reply:
        which = next(number)  # the first is the one that is tried
        if which == 2:
            return refused("503 No", json.dumps({"error": {"message": "\x1b[2Jtry later"}}))
        return [None] if which == 4 else streamed(text_event("a"), tokens=1 if which % 2 else 4)

    with serving(reply) as url:
        given = "--streams", "1", "--requests", "8"
        code, _, err = run(capsys, "bench", url, *SHORT, *given)
    assert code == 1
    assert "1 of 8 failed: 503: \ufffd[2Jtry later" in err
    assert "1 of 8 failed: the connection was closed before the end" in err
    assert "4 answers are shorter than asked" in err


def test_what_a_server_refuses_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = json.dumps({"error": {"message": "ignore_eos is not known"}})
    with serving(lambda body: refused("400 Bad", error)) as url:
        code, out, err = run(capsys, "bench", url, *SHORT)
    assert (code, out) == (2, "")
    assert "400: ignore_eos is not known" in err
    assert "--any-length" in err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--streams", "1,x"], "--streams has 'x'"),
        (["--rate", "0"], "--rate has '0'"),
        (["--prompt", "9-3"], "--prompt is '9-3'"),
        (["--ids", "9-3"], "--ids is '9-3'"),
        (["--clients", "-1"], "--clients is -1"),
        (["--plot", "x.jpg"], "--plot is 'x.jpg'"),
        (["--json", "/nowhere/x"], "--json /nowhere/x cannot be written"),
        (["--streams", "9" * 5000], "--streams has '9"),
        (["--requests", "0"], "--requests is 0"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], given: list[str], told: str) -> None:
    code, _, err = run(capsys, "bench", "http://127.0.0.1:1", "--model", "m", *given)
    assert code == 2
    assert told in err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(four) as url:
        pass
    code, _, err = run(capsys, "bench", url)
    assert code == 2
    assert "cannot be reached" in err
    assert err.count("\n") == 1


def test_clients_end_with_their_parent() -> None:
    """However it ends."""
    program = "import sys; from photon_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    with serving(lambda body: [*streamed(text_event("a"), tokens=4)[:2], 30.0]) as url:
        given = [url, *SHORT, "--timeout", "30"]
        parent = subprocess.Popen([sys.executable, "-c", program, "bench", *given])
        clients: list[int] = []
        until(lambda: clients.extend(children_of(parent.pid)) or clients)
        parent.kill()
        parent.wait()
        until(lambda: not any(map(is_alive, clients)))


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [*map(int, listed.read_text().split())] if listed.exists() else []
