"""Our engine beside its peers: ms per decode step on the same weights, prompts and window.

    python -m benchmarks.peers --model qwen3-0.6b --batches 1,8,32 --json FILE
    python -m benchmarks.peers --table benchmarks/results/peers-h200.jsonl

All are greedy, each in a process of its own. A model is a named shape, whose random weights are
written as a checkpoint that every peer loads and that is removed afterwards, or a Hugging Face
directory. What is timed is the same for all: new tokens N / 4 to N after prompts of 64 tokens;
where a peer would take longer than --seconds for them, fewer, as its row says. A peer that is not
installed is reported as missing with how to get it, one that breaks as failed with its error.
`--table` makes a Markdown table of several results; `benchmarks.report FILE` shows one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.common import options as cli
from benchmarks.common.models import SHAPES
from benchmarks.common.result import BenchmarkError, ResultFile, read_runs
from benchmarks.common.result_tables import tables_of
from benchmarks.common.session import random_prompts
from benchmarks.engines.catalog import CATALOG, missing
from benchmarks.engines.peer import Setup, Tokens, Window
from benchmarks.engines.process import Report, run_module, run_worker
from benchmarks.engines.tables import files_table
from photon_ext.cli.info import describe
from photon_ext.errors import ModelError
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.weights import empty_weights

SHARED_MEMORY = Path("/dev/shm")
ROOM = 1.2  # a checkpoint's size over its weights', at most
PROMPT = 64
ON_GPU = {
    "model": ["qwen3-0.6b"],
    "peers": list(CATALOG),
    "batches": [1, 8, 32],
    "new_tokens": 512,
    "seconds": 10.0,
}
ON_CPU = {
    "model": ["tiny"],
    "peers": ["ours", "ours-engine", "hf-cb", "hf-static"],
    "batches": [1, 4],
    "new_tokens": 64,
    "seconds": 2.0,
}


class Model(NamedTuple):
    """Its shape, the checkpoint, and the bytes of weights that a step reads."""

    name: str
    config: ModelConfig
    directory: Path
    weight_bytes: int


@contextmanager
def checkpoint(name: str, dtype: str, device: str, timeout: float) -> Iterator[Model]:
    """The model's directory; one with random weights is written, by a process of its own, and
    removed at the end."""
    if name not in SHAPES:
        settings, directory = Path(name) / "config.json", Path(name).resolve()
        if not settings.is_file():
            known = ", ".join(SHAPES)
            told = f"neither a shape ({known}) nor a directory with a config.json"
            raise BenchmarkError(f"{name}: {told}")
        config = hf_config(json.loads(settings.read_text()), str(settings))
        size = empty_weights(config, cli.DTYPES[dtype], "meta").bytes_per_step
        yield Model(directory.name, config, directory, size)
        return
    config = SHAPES[name]
    weights = empty_weights(config, cli.DTYPES[dtype], "meta")
    with tempfile.TemporaryDirectory(
        dir=_roomy_folder(weights.nbytes), prefix="photon-checkpoint-"
    ) as made:
        directory = Path(made) / "model"
        given = ["--model", name, "--dtype", dtype, "--device", device, str(directory)]
        failure = run_module("benchmarks.common.checkpoint", given, timeout)
        if failure is not None:
            told = f"could not be written to {made}: {failure}"
            raise BenchmarkError(f"the checkpoint of {name} {told}")
        yield Model(name, config, directory, weights.bytes_per_step)


def _roomy_folder(size: int) -> str:
    """Shared memory where it is large enough, else the usual place for temporary files."""
    folders = [each for each in (SHARED_MEMORY, Path(tempfile.gettempdir())) if each.is_dir()]
    free = {str(folder): shutil.disk_usage(folder).free for folder in folders}
    roomy = next((folder for folder, space in free.items() if space > ROOM * size), None)
    if roomy is None:
        told = ", ".join(f"{each}: {space / 2**30:.1f} GiB free" for each, space in free.items())
        needed = f"a checkpoint of {size / 2**30:.1f} GiB has no room"
        raise BenchmarkError(f"{needed} ({told}); name a place with the variable TMPDIR")
    return roomy


def floor_rate(device: str, gib: float | None, timeout: float) -> dict[str, Any]:
    """The read floor, from a process of its own: nothing of it may stay on the device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor.jsonl"
        size = [] if gib is None else ["--gib", str(gib)]
        given = ["--device", device, "--json", str(path), *size]
        failure = run_module("benchmarks.floor", given, timeout)
        if failure is not None:
            raise BenchmarkError(f"the read floor could not be measured: {failure}")
        entry: dict[str, Any] = read_runs(path)[0]["entries"][0]
    return {"bytes_per_s": entry["bytes_per_s"], "method": entry["method"]}


def common_prefix(ours: Tokens, theirs: Tokens) -> float:
    """The mean share of a row's tokens before the first that differs from ours."""
    shares = []
    for pair in zip(ours, theirs, strict=True):
        length = min(map(len, pair))
        differs = (i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
        shares.append(next(differs, length) / length)
    return fmean(shares)


class Comparison:
    """The peers of one model in turn; the others are compared with what is there of "ours"."""

    def __init__(
        self, model: Model, args: Namespace, device: str, bytes_per_s: float, result: ResultFile
    ) -> None:
        self._model, self._args, self._device = model, args, device
        self._bytes_per_s, self._result = bytes_per_s, result
        self._window = Window(PROMPT, max(1, args.new_tokens // 4), args.new_tokens)
        self._ours: dict[int, dict[str, Any]] = {}

    def add(self, peer: str) -> None:
        """One entry per batch, once it is measured."""
        args, model, title = self._args, self._model, CATALOG[peer].title
        labels = {"what": "peer", "model": model.name, "dtype": args.dtype, "peer": peer}
        labels["title"], python = title, dict(args.python).get(peer)
        reason = missing(peer, self._device, python)
        if reason is not None:
            self._result.absent(labels, "missing", reason)
            return
        self._result.progress.show(f"peers: {model.name}, {title}")
        setup = Setup(
            directory=str(model.directory),
            dtype=args.dtype,
            device=self._device,
            window=self._window,
            seconds=args.seconds,
            backend=cli.backend_of(args),
        )
        prompts = [random_prompts(model.config.vocab, batch, PROMPT) for batch in args.batches]
        left = list(args.batches)

        def add_row(report: Report, batch: int) -> None:
            left.remove(batch)
            figures = partial(self._figures, peer, batch, report)
            self._result.measure({**labels, "batch": batch}, figures)

        report = run_worker(peer, setup, prompts, args.timeout, python, add_row)
        for batch in tuple(left):
            add_row(report, batch)

    def _figures(self, peer: str, batch: int, report: Report) -> dict[str, Any]:
        line = report.of(batch)
        window, ms = Window(*line["window"]), line["ms_per_step"]
        if peer == "ours":
            self._ours[batch] = line
        ours = self._ours.get(batch)
        itemsize = cli.DTYPES[self._args.dtype].itemsize
        kv = round(batch * window.context * self._model.config.kv_bytes_per_token(itemsize))
        floor_ms = (self._model.weight_bytes + kv) / self._bytes_per_s * 1e3
        return {
            **(report.loaded or {}),
            "ms_per_step": ms,
            "ms_spread": line["ms_spread"],
            "samples": line["samples"],
            "tokens_per_s": batch / ms * 1e3,
            "context": window.context,
            "window": window._asdict(),
            "floor_ms": floor_ms,
            "floor_share": floor_ms / ms,
            "against_ours": None if ours is None else ms / ours["ms_per_step"],
            "same_tokens": None if ours is None else common_prefix(ours["tokens"], line["tokens"]),
            "first_tokens": line["tokens"][0][:8],
            "measure_s": line["seconds"],
        }


def interpreter(text: str) -> tuple[str, str]:
    """ "vllm=/opt/vllm/bin/python" as its two parts."""
    peer, sign, path = text.partition("=")
    if not sign or peer not in CATALOG or not path:
        told = f"{text!r}: expected PEER=PATH with a peer of {', '.join(CATALOG)}"
        raise argparse.ArgumentTypeError(told)
    return peer, path


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    add, known = options.add_argument, ", ".join(CATALOG)
    add("--model", type=cli.names, help=f"of {', '.join(SHAPES)}, or Hugging Face directories")
    add("--peers", type=cli.names, help=f"of {known}")
    add("--batches", type=cli.integers)
    add("--new-tokens", type=cli.positive_integer)
    add("--dtype", choices=cli.DTYPES, default="bfloat16")
    cli.backend_option(options)
    told = "run a peer with the interpreter it is installed for"
    add("--python", type=interpreter, action="append", default=[], metavar="PEER=PATH", help=told)
    told = "for one batch of a peer, about; a slower one makes fewer tokens"
    add("--seconds", type=cli.positive_number, help=told)
    add(
        "--timeout", type=cli.positive_number, default=600.0, help="seconds for a peer, all batches"
    )
    cli.floor_option(options)
    add("--table", type=Path, nargs="+", metavar="FILE", help="make a table of results, and end")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    unknown = [peer for peer in args.peers if peer not in CATALOG]
    if unknown:
        options.error(f"--peers {', '.join(unknown)}: unknown; known are {known}")
    if args.new_tokens < 8:
        told = "expected 8 or more, a window of three quarters of them is timed"
        options.error(f"--new-tokens {args.new_tokens}: {told}")
    if args.device not in ("auto", "cpu", "cuda"):
        told = "peers take auto, cpu or cuda; choose a GPU with CUDA_VISIBLE_DEVICES"
        options.error(f"--device {args.device}: {told}")
    return args


def run_model(
    name: str, args: Namespace, device: str, bytes_per_s: float, result: ResultFile
) -> None:
    """Adds all peers of one model."""
    try:
        with checkpoint(name, args.dtype, device, args.timeout) as model:
            comparison = Comparison(model, args, device, bytes_per_s, result)
            for peer in sorted(args.peers, key=lambda peer: peer != "ours"):
                comparison.add(peer)
    except (BenchmarkError, ModelError, OSError, ValueError) as error:
        wrong = BenchmarkError(str(error))

        def fail() -> dict[str, Any]:
            raise wrong

        result.measure({"what": "checkpoint", "model": name}, fail)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    if args.table:
        try:
            print(files_table(args.table))
        except ValueError as error:
            print(f"peers: {error}", file=sys.stderr)
            return 1
        return 0
    device = cli.device_of(args.device).type
    result = ResultFile("peers", args, args.json)
    result.set(info=describe().splitlines())
    rate = partial(floor_rate, device, args.floor_gib, args.timeout)
    floor = result.measure({"what": "floor"}, rate)
    if floor is None:
        return 1
    speed = f"{floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']})"
    print(f"read floor {speed}; torch {torch.__version__}", flush=True)
    for name in args.model:
        run_model(name, args, device, floor["bytes_per_s"], result)
    for table in tables_of(result.data):
        table.show()
    for entry in result.entries:
        if entry["status"] == "missing":
            print(f"{entry['model']}: {entry['title']} is missing: {entry['reason']}")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
