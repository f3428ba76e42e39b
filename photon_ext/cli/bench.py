"""`photon-ext bench`: traffic against a server that speaks OpenAI's API, and what it took."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from photon_ext.bench.asks import Endpoint, Lengths, Traffic
from photon_ext.bench.figures import Figures, Spread
from photon_ext.bench.run import Clients
from photon_ext.checks import check_count
from photon_ext.cli.remote_server import RemoteServer
from photon_ext.cli.terminal import complain, printable, say
from photon_ext.errors import ConfigError, PhotonError, shown

FAILED = 1
PER_STREAM, BY_THE_CLOCK = 4, 256  # requests of a run
MOST_CLIENTS = 8
BUSY = 0.7  # of its time that a client process may compute: beyond, it is what is measured
_MOST = 1_000_000


class Run(NamedTuple):
    """One run: `streams` requests at any time, or `rate` of them in a second; neither: a burst."""

    streams: int = 0
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.streams:
            return f"{self.streams} streams" if self.streams > 1 else "1 stream"
        return "burst" if self.rate is None else f"{self.rate:g}/s"

    def requests(self, asked: int | None) -> int:
        least = PER_STREAM * self.streams or BY_THE_CLOCK
        return least if asked is None else max(asked, self.streams)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code: 1 where a request has failed."""
    runs, traffic = _runs(arguments), _traffic(arguments)
    if arguments.json is not None:
        _check_place(arguments.json)
    plot = _plot(arguments.plot) if arguments.plot is not None else None
    endpoint = _endpoint(arguments)
    processes = arguments.clients or min(MOST_CLIENTS, max(1, (os.cpu_count() or 1) // 2))
    clients = Clients(endpoint, check_count("--clients", processes, 256), arguments.timeout)
    _try(clients, traffic)
    found: dict[Run, Figures] = {}
    with _progress() as show:
        for number, one in enumerate(runs, 1):
            asks = traffic.asks(one.requests(arguments.requests), one.rate, number)
            step = show(one.name, len(asks))
            found[one] = Figures.of(clients.run(asks, one.streams, step))
            step(len(asks))
    _tell(endpoint, found)
    if arguments.json is not None:
        _write(arguments.json, endpoint, traffic, found)
    if plot is not None:
        plot({one.name: figures for one, figures in found.items()}, arguments.plot)
    return FAILED if any(figures.failed for figures in found.values()) else 0


# --- what is asked --------------------------------------------------------------------------------


def _runs(arguments: argparse.Namespace) -> list[Run]:
    if arguments.requests is not None:
        check_count("--requests", arguments.requests, _MOST)
    if arguments.rate is None:
        return [Run(streams=_number("--streams", one)) for one in arguments.streams.split(",")]
    return [Run() if one == "burst" else Run(rate=_rate(one)) for one in arguments.rate.split(",")]


def _number(name: str, text: str) -> int:
    if not (text.isdecimal() and len(text) < 10):
        raise ConfigError(f"{name} has {shown(text)}; give whole numbers, with commas between")
    return check_count(name, int(text), 65536)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < _MOST:
        raise ConfigError(f"--rate has {shown(text)}; give requests a second, or burst")
    return rate


def _traffic(arguments: argparse.Namespace) -> Traffic:
    ids = None
    if not (arguments.text or arguments.chat):
        low, _, high = arguments.ids.partition("-")
        if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
            raise ConfigError(f"--ids is {shown(arguments.ids)}; give two, as 1000-30000")
        ids = int(low), int(high)
    prompt, answer = arguments.prompt, arguments.answer
    lengths = Lengths.of("--prompt", prompt), Lengths.of("--answer", answer)
    return Traffic(*lengths, ids, arguments.seed)


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    server = RemoteServer(arguments.url, arguments.api_key)
    model = arguments.model or server.first_model()
    url = server.base.removesuffix("/v1")
    return Endpoint(url, model, arguments.chat, server.api_key, not arguments.any_length)


def _try(clients: Clients, traffic: Traffic) -> None:
    """One short request: what a server refuses, it refuses of all."""
    ask = traffic.asks(1)[0]._replace(answer=1)
    (answer,) = clients.run([ask], 1, lambda ended: None).answers
    if answer.error is not None:
        raise PhotonError(
            f"the server refuses a first request: {printable(answer.error)}. Prompts of words: "
            "--text; ids of a small vocabulary: --ids; without ignore_eos: --any-length"
        )


# --- what is told ---------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Any]:
    """Gives what begins a run, and returns what is told how many requests have ended: a bar on a
    terminal, and elsewhere a line for each run.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    if not console.is_terminal:

        def say_run(name: str, total: int) -> Any:
            complain(f"{name}: {total} requests")
            return lambda ended: None

        yield say_run
        return
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:

        def begin(name: str, total: int) -> Any:
            task = bars.add_task(name, total=total)
            return lambda ended: bars.update(task, completed=ended)

        yield begin


def _tell(endpoint: Endpoint, found: dict[Run, Figures]) -> None:
    title = f"{endpoint.model} at {endpoint.url}; milliseconds: median / 99th percentile"
    table = Table(title=Text(printable(title)), title_justify="left")
    for name in ("", "requests", "failed", "tokens/s", "first token", "a token", "whole answer"):
        table.add_column(name, justify="right" if name else "left")
    for one, figures in found.items():
        times = figures.ttft_ms, figures.tpot_ms, figures.e2e_ms
        failed = str(sum(figures.failed.values()))
        counts = str(figures.requests), failed, f"{figures.tokens_per_s:,.0f}"
        table.add_row(one.name, *counts, *map(_shown, times))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    with console.capture() as text:
        console.print(table)
    say(text.get(), end="")
    for one, figures in found.items():
        for warning in _warnings(figures):
            complain(f"{one.name}: {warning}")


def _shown(spread: Spread) -> str:
    return "–" if spread is None else f"{spread['p50']:.2f} / {spread['p99']:.2f}"


def _warnings(figures: Figures) -> Iterator[str]:
    for why, count in figures.failed.items():
        yield f"{count} of {figures.requests} failed: {printable(why)}"
    if figures.short:
        yield f"{figures.short} answers are shorter than asked: the model ended them"
    if figures.uncounted:
        yield f"{figures.uncounted} answers came without usage: their events are counted as tokens"
    if figures.client_busy > BUSY:
        share = f"{100 * figures.client_busy:.0f} %"
        yield f"a client process was busy for {share} of the time; give more by --clients"


def _check_place(path: str) -> None:
    """Before minutes of work, whether a file can be written there. Raises ConfigError."""
    file = Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written; name a file to write")


def _write(path: str, endpoint: Endpoint, traffic: Traffic, found: dict[Run, Figures]) -> None:
    runs = [{**one._asdict(), **asdict(figures)} for one, figures in found.items()]
    asked = {"endpoint": endpoint._replace(api_key=None)._asdict(), "traffic": traffic._asdict()}
    try:
        Path(path).write_text(json.dumps({**asked, "runs": runs}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; name a file to write") from error


def _plot(path: str) -> Any:
    """What draws it; before minutes of work, whether it can."""
    if not path.endswith(".png"):
        raise ConfigError(f"--plot is {shown(path)}; name a file that ends in .png")
    try:
        from photon_ext.bench.plot import draw
    except ImportError as error:
        raise ConfigError(f"--plot: {error}; pip install matplotlib") from error
    return draw
