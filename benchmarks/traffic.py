"""Requests as users send them: latencies and throughput by rate, for our engine and vLLM.

    python -m benchmarks.traffic --model qwen3-0.6b --loads mix --rates burst,10,20,40 --json FILE
    python -m benchmarks.traffic --loads chat --rates 10 --sweep --depth 1,2
    python -m benchmarks.traffic --engine prefill=mixed/separate --engine max_rows=256
    python -m benchmarks.traffic --rates burst --quantize none,fp8,int4

Arrivals are by the clock, those of a Poisson process or all at once (`burst`), and no answer delays
one; latencies count from when a request was due. `--sweep` raises the rate until requests queue for
1 s, and measures again at 80 % of that; the longer arrivals last, the less above the capacity that
is. Each load is warmed up first, each engine has a process of its own, and all get the same
requests. Several values of an option of our engine are measured in turn: `--depth 2,1,2`. Loads and
their lengths are in `benchmarks/open_loop/loads.py`.
`benchmarks.report FILE` shows the table of a result, `benchmarks.plots --traffic FILE` a plot.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

from benchmarks.common import options as cli
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.engines.catalog import CATALOG, missing
from benchmarks.engines.process import run_module
from benchmarks.open_loop.cells import BURST, SERVERS, Plan
from benchmarks.open_loop.loads import LOADS
from benchmarks.peers import checkpoint, interpreter
from photon_ext.errors import ModelError
from photon_ext.models.requantize import CHOICES

WORKER = "benchmarks.open_loop.cells"
Hear = Callable[[dict[str, Any]], None]
ON_GPU = {
    "model": ["qwen3-0.6b"],
    "loads": ["mix"],
    "rates": [BURST, 40.0],
    "requests": 256,
    "scale": 1.0,
}
ON_CPU = {
    "model": ["tiny"],
    "loads": ["short", "mix", "shared", "turns"],
    "rates": [BURST, 20.0],
    "requests": 16,
    "scale": 0.125,
}


def rates(text: str) -> list[float | str]:
    """ "burst,10,40" as rates."""
    return [part if part == BURST else cli.positive_number(part) for part in cli.names(text)]


def engine_option(text: str) -> tuple[str, list[Any]]:
    """ "depth=1/2" as a name and its values: Python's literals, else text."""
    name, sign, values = text.partition("=")
    if not (name and sign and values):
        raise argparse.ArgumentTypeError(f"{text!r}: expected OPTION=VALUE or OPTION=VALUE/VALUE")
    return name, [_literal(value) for value in values.split("/")]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def variants(args: Namespace) -> list[dict[str, Any]]:
    """Options of our engine, one value of each, in every combination."""
    named = {
        "quantize": args.quantize,
        "depth": args.depth,
        "max_rows": args.rows,
        "chunk": args.chunk,
        **dict(args.engine),
    }
    given = {name: values for name, values in named.items() if values}
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


def measure(model: str, engine: str, args: Namespace, result: ResultFile) -> None:
    """One engine, each variant in a process of its own; where it is missing or fails an entry says
    why."""
    for options in variants(args) if engine == "ours" else [{}]:
        chosen = (f" {name}={value}" for name, value in options.items())
        title = CATALOG[engine].title + "".join(chosen)
        labels = {"model": model, "engine": engine, "title": title, "options": options}
        missed = missing(engine, cli.device_of(args.device).type, dict(args.python).get(engine))
        try:
            failed = missed or serve(model, engine, options, args, listener(labels, result))
        except (BenchmarkError, ModelError, OSError, ValueError) as error:
            failed = str(error)
        if failed is not None:
            status = "missing" if missed else "failed"
            result.absent({"what": "cell", **labels}, status, failed)


def serve(
    model: str, engine: str, options: dict[str, Any], args: Namespace, hear: Hear
) -> str | None:
    """Why the worker failed, or None."""
    device, dtype = cli.device_of(args.device), args.dtype or "bfloat16"
    longest = max(LOADS[name].scaled(args.scale).longest for name in args.loads)
    options = dict(options)
    quantize = options.pop("quantize", None)
    task = {"engine": engine, "model": model, "device": str(device), "dtype": args.dtype}
    task["quantize"] = quantize
    task["plan"] = {name: getattr(args, name) for name in Plan._fields}
    task["options"] = {"max_len": longest, **options}
    with ExitStack() as stack:
        if engine != "ours":  # the weights that ours makes or loads itself, as files
            files = stack.enter_context(checkpoint(model, dtype, device.type, args.timeout))
            task["directory"] = str(files.directory)
        python, given = dict(args.python).get(engine), json.dumps(task)
        return run_module(WORKER, [], args.timeout, given, python, hear)


def listener(labels: dict[str, Any], result: ResultFile) -> Hear:
    """Makes the entries of a result of the lines that a worker says."""
    facts: dict[str, Any] = {}

    def hear(said: dict[str, Any]) -> None:
        if said["what"] == "loaded":
            facts.update({name: said[name] for name in ("version", "load_s", "start_up")})
        elif said["what"] == "begins":
            result.progress.show(f"traffic: {labels['title']}, {said['told']}")
        else:
            named = {name: said[name] for name in ("what", "load", "rate")}
            result.measure({**labels, **named}, lambda: {**facts, **said})

    return hear


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    cli.models_option(options)
    add, number, several = options.add_argument, cli.positive_integer, {"type": cli.integers}
    add(
        "--engines",
        type=cli.names,
        default=list(SERVERS),
        help=f"of {', '.join(SERVERS)}",
    )
    add("--loads", type=cli.names, help=f"of {', '.join(LOADS)}")
    add("--rates", type=rates, help=f"arrivals per second, or {BURST}; of chats, not of turns")
    add("--sweep", action="store_true", help="raise the first rate until requests queue for 1 s")
    add("--requests", type=number, help="of a cell; in a sweep at least")
    told = "that the arrivals of a sweep's cell last; default 10"
    add("--seconds", type=cli.positive_number, default=10.0, help=told)
    add("--scale", type=cli.positive_number, help="of all lengths")
    add("--seed", type=number, default=7, help="of the first cell; 7: the burst in the README")
    add("--dtype", choices=cli.DTYPES, help="default: as benchmarks.decode")
    told = "how weights of our engine lie in memory: " + ", ".join(CHOICES)
    add("--quantize", type=cli.some_of(CHOICES), default=[], help=told)
    add("--depth", **several, default=[], help="steps in flight")
    add("--rows", **several, default=[], help="max_rows of the engine")
    add("--chunk", **several, default=[], help="prompt tokens of a step")
    told = "any option of the engine; several values are measured in turn"
    add("--engine", type=engine_option, action="append", default=[], metavar="K=V/V", help=told)
    told = "run vllm with the interpreter it is installed for"
    add("--python", type=interpreter, action="append", default=[], metavar="PEER=PATH", help=told)
    add("--timeout", type=cli.positive_number, default=1800.0, help="seconds for an engine")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    for option, known in (("engines", SERVERS), ("loads", LOADS)):
        unknown = ", ".join(name for name in getattr(args, option) if name not in known)
        if unknown:
            options.error(f"--{option} {unknown}: unknown; known are {', '.join(known)}")
    if args.sweep and not any(isinstance(rate, float) for rate in args.rates):
        told = f"--sweep begins at the first rate that is a number, and --rates has {BURST} alone"
        options.error(f"{told}; add one, for instance --rates {BURST},10")
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    result = ResultFile("traffic", args, args.json)
    for model in args.model:
        for engine in args.engines:
            measure(model, engine, args, result)
    for table in tables_of(result.data):
        table.show()
    for entry in result.entries:
        if entry["status"] != "ok":
            print(f"{entry['model']}: {entry['title']} {entry['status']}: {entry['reason']}")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
