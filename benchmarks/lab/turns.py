"""Steps of several builds of the ops in turns, in one run: what a change to a kernel is worth.

    python -m benchmarks.lab.turns --model qwen3-0.6b --batches 1,32 --ways \
        today=photon_ext/_ops.abi3.so,other=/tmp/other/_ops.abi3.so@16-64,no_o=photon_ext/_ops.abi3.so:o

A way is a build of `_ops`, perhaps kernels that its steps leave out (see LabStep), and perhaps the
only batches that it is for. Each build has a process, all of which are there at once and run one at
a time. A round has a turn of each way at each batch; its ratio is to the mean of the first way's
turns of this round and the next. The first way has a turn more, and is for all batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.common import options as cli
from benchmarks.common.result import ResultFile
from photon_ext.models.requantize import CHOICES


class Way(NamedTuple):
    name: str
    library: str
    without: str
    batches: range

    @classmethod
    def of(cls, text: str) -> Way:
        name, _, rest = text.partition("=")
        rest, _, batches = rest.partition("@")
        library, _, without = rest.partition(":")
        first, last = map(int, (batches or "1-64").split("-"))
        return cls(name, str(Path(library).resolve()), without, range(first, last + 1))


class Worker:
    """A process with one build."""

    def __init__(self, library: str, args: Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lab.turns", "--serve", *given_again(args)],
            env=os.environ | {"PHOTON_OPS_LIBRARY": library},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, batch: int, without: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps([batch, without]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else [nan, []]  # it has ended, and has said why

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def given_again(args: Namespace) -> list[str]:
    given = ["--model", args.model, "--context", str(args.context), "--device", str(args.device)]
    return given + (["--quantize", args.quantize] if args.quantize else [])


def serve(args: Namespace) -> None:
    """Answers each line, a batch and what to leave out, with the milliseconds of a turn and the
    tokens that came. The first one makes the graph."""
    import torch

    from benchmarks.common.models import open_model
    from benchmarks.lab.step import LabStep

    torch.manual_seed(0)
    config, weights = open_model(args.model, None, cli.device_of(args.device), args.quantize)
    steps: dict[tuple[int, str], LabStep] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        key: tuple[int, str] = tuple(json.loads(line))  # type: ignore[assignment]
        if key not in steps:
            steps[key] = LabStep(config, weights, key[0], args.context, key[1])
        ms = steps[key].turn()
        print(json.dumps([ms, steps[key].tokens()]), flush=True)


def measure(ways: list[Way], args: Namespace) -> list[dict[str, Any]]:
    workers = {library: Worker(library, args) for library in dict.fromkeys(w.library for w in ways)}
    for worker in workers.values():
        worker.answer()
    times: dict[tuple[int, str], list[float]] = {}
    tokens: dict[tuple[int, str], list[int]] = {}

    def turn(batch: int, way: Way) -> float:
        workers[way.library].send(batch, way.without)
        ms, tokens[batch, way.name] = workers[way.library].answer()
        return float(ms)

    for batch in args.batches:
        mine = [way for way in ways if batch in way.batches]
        for way in mine:
            turn(batch, way)  # makes the graph, and warms up
            times[batch, way.name] = []
        for _ in range(args.rounds):
            for way in mine:
                times[batch, way.name].append(turn(batch, way))
        times[batch, ways[0].name].append(turn(batch, ways[0]))
    for worker in workers.values():
        worker.close()
    first = ways[0].name
    return [
        {
            "what": "turns",
            "model": args.model,
            "quantize": args.quantize,
            "context": args.context,
            "batch": batch,
            "way": way.name,
            "ms": [round(ms, 5) for ms in times[batch, way.name]],
            "median_ms": median(times[batch, way.name]),
            "ratio": ratio(times[batch, way.name], times[batch, first]),
            "same_tokens": tokens[batch, way.name] == tokens[batch, first],
        }
        for batch in args.batches
        for way in ways
        if batch in way.batches
    ]


def ratio(times: list[float], first: list[float]) -> float:
    """The median over rounds."""
    beside = [(a + b) / 2 for a, b in pairwise(first)]
    return median(ms / base for ms, base in zip(times, beside, strict=False))


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--model", default="qwen3-0.6b")
    add("--quantize", choices=CHOICES, help="how weights lie; default: as load_model does")
    add("--batches", type=cli.integers, default=[1, 8, 32])
    add("--context", type=cli.positive_integer, default=512)
    add("--rounds", type=cli.positive_integer, default=5)
    add("--ways", type=lambda text: [Way.of(each) for each in text.split(",")], default=[])
    add("--serve", action="store_true", help="for its own processes")
    return options.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    if args.serve:
        serve(args)
        return 0
    result = ResultFile("lab.turns", args, args.json)
    for line in measure(args.ways, args):
        print(
            f"{line['model']} B={line['batch']:<3} {line['way']:<12} {line['median_ms']:.4f} ms  "
            f"{line['ratio']:.4f}  {'same' if line['same_tokens'] else 'other'} tokens",
            flush=True,
        )
        result.add(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
