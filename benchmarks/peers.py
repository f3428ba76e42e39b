"""Our engine beside its peers: ms per decode step on the same weights, prompts and context window,
greedy, each in a process of its own.

    python -m benchmarks.peers --model qwen3-0.6b --batches 1,8,32 --json FILE [--peers
    ours,hf-cb,vllm] [--markdown FILE]

A model is a named shape, whose random weights are written as a checkpoint that every peer loads and
that is removed afterwards, or a Hugging Face directory. What is timed is the same for all: new
tokens N / 4 to N after prompts of 64 tokens; where a peer would take longer than --seconds for
them, fewer, as its row says. How differs with what a peer tells, and is in its row. A peer that is
not installed is reported as missing with how to get it, one that breaks as failed with its error.
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

from benchmarks.common.options import (
    DTYPES,
    backend_option,
    device_of,
    integers,
    names,
    output_file,
    parser,
    positive_integer,
    positive_number,
    use_hopper,
    writable_folder,
)
from benchmarks.common.result import BenchmarkError, ResultFile, write_text
from benchmarks.common.session import random_prompts
from benchmarks.common.shapes import SHAPES
from benchmarks.common.table import markdown_table, print_table
from benchmarks.engines.catalog import CATALOG, missing
from benchmarks.engines.peer import Setup, Tokens, Window
from benchmarks.engines.process import Report, last_line, run_module, run_worker
from photon_ext.cli.info import describe
from photon_ext.errors import ModelError
from photon_ext.models.config import ModelConfig
from photon_ext.models.hf_config import hf_config
from photon_ext.models.weights import empty_weights

HEADER = (
    "peer",
    "version",
    "B",
    "ms/step",
    "least",
    "most",
    "tok/s",
    "share",
    "against ours",
    "same tokens",
    "how",
    "mode",
)
SHARED_MEMORY = Path("/dev/shm")
ROOM = 1.2  # a checkpoint's size over its weights', at most
PROMPT = 64


class Model(NamedTuple):
    """What is measured: its shape, the checkpoint, and the bytes of weights that a step reads."""

    name: str
    config: ModelConfig
    directory: Path
    weight_bytes: int


@contextmanager
def checkpoint(
    name: str, dtype: str, device: str, folder: str | None, timeout: float
) -> Iterator[Model]:
    """The model's directory; one with random weights is written, in a process of its own, and
    removed at the end.
    """
    if name not in SHAPES:
        if not (Path(name) / "config.json").is_file():
            raise BenchmarkError(
                f"{name}: neither a shape ({', '.join(SHAPES)}) nor a directory with a config.json"
            )
        config = hf_config(
            json.loads((Path(name) / "config.json").read_text()), f"{name}/config.json"
        )
        directory = Path(name).resolve()
        yield Model(directory.name, config, directory, _weight_bytes(config, dtype))
        return
    config = SHAPES[name]
    size = empty_weights(config, DTYPES[dtype], "meta").nbytes
    with tempfile.TemporaryDirectory(
        dir=folder or _roomy_folder(size), prefix="photon-checkpoint-"
    ) as made:
        directory, log = Path(made) / "model", Path(made) / "log.txt"
        given = ["--model", name, "--dtype", dtype, "--device", device, str(directory)]
        failure = run_module("benchmarks.common.checkpoint", given, log, timeout)
        if failure is not None:
            raise BenchmarkError(
                f"the checkpoint of {name} could not be written to {made}: {failure}; choose "
                "another place with --folder"
            )
        yield Model(name, config, directory, _weight_bytes(config, dtype))


def _weight_bytes(config: ModelConfig, dtype: str) -> int:
    return empty_weights(config, DTYPES[dtype], "meta").bytes_per_step


def _roomy_folder(size: int) -> str:
    """Shared memory where it is large enough, else the usual place for temporary files."""
    folders = [folder for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]
    roomy = [folder for folder in folders if shutil.disk_usage(folder).free > ROOM * size]
    if not roomy:
        free = ", ".join(
            f"{folder}: {shutil.disk_usage(folder).free / 2**30:.1f} GiB free" for folder in folders
        )
        raise BenchmarkError(
            f"a checkpoint of {size / 2**30:.1f} GiB has no room ({free}); name a place with "
            "--folder"
        )
    return str(roomy[0])


def floor_rate(device: str, gib: float | None, timeout: float) -> dict[str, Any]:
    """The read floor, from a process of its own: nothing of it may stay on the device while
    peers run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "floor.json", Path(folder) / "log.txt"
        size = [] if gib is None else ["--gib", str(gib)]
        failure = run_module(
            "benchmarks.floor", ["--device", device, "--json", str(path), *size], log, timeout
        )
        if failure is not None:
            raise BenchmarkError(
                f"the read floor could not be measured: {failure}: {last_line(log)}"
            )
        entry: dict[str, Any] = json.loads(path.read_text())["entries"][0]
    return {"bytes_per_s": entry["bytes_per_s"], "method": entry["method"]}


def common_prefix(ours: Tokens, theirs: Tokens) -> float:
    """The mean share of a row's tokens before the first that differs from ours; of the shorter
    where one has fewer.
    """
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        length = min(len(a), len(b))
        same = next((i for i in range(length) if a[i] != b[i]), length)
        shares.append(same / length)
    return fmean(shares)


class Comparison:
    """The peers of one model, measured in turn; what came first as "ours" is what the others are
    compared with.
    """

    def __init__(
        self, model: Model, args: Namespace, device: str, bytes_per_s: float, result: ResultFile
    ) -> None:
        self._model, self._args, self._device, self._bytes_per_s, self._result = (
            model,
            args,
            device,
            bytes_per_s,
            result,
        )
        self._window = Window(PROMPT, max(1, args.new_tokens // 4), args.new_tokens)
        self._ours: dict[int, dict[str, Any]] = {}

    def add(self, peer: str) -> list[dict[str, Any]]:
        """One entry per batch; returns those that were measured."""
        labels = {
            "what": "peer",
            "model": self._model.name,
            "dtype": self._args.dtype,
            "peer": peer,
            "title": CATALOG[peer].title,
        }
        python = dict(self._args.python).get(peer)
        reason = missing(peer, self._device, python)
        if reason is not None:
            self._result.absent(labels, "missing", reason)
            return []
        print(f"{self._model.name}: {CATALOG[peer].title} ...", flush=True)
        args = self._args
        setup = Setup(
            str(self._model.directory),
            args.dtype,
            self._device,
            self._window,
            args.seconds,
            args.load_format,
            args.spin,
            use_hopper(args),
        )
        prompts = [
            random_prompts(self._model.config.vocab, batch, PROMPT) for batch in args.batches
        ]
        rows: dict[int, dict[str, Any] | None] = {}

        def add_row(report: Report, batch: int) -> None:
            rows[batch] = self._result.measure(
                {**labels, "batch": batch}, partial(self._figures, peer, batch, report)
            )

        def heard(report: Report) -> None:
            for batch in report.batches.keys() - rows.keys():
                add_row(report, batch)

        report = run_worker(peer, setup, prompts, args.timeout, python, heard)
        for batch in args.batches:
            if batch not in rows:
                add_row(report, batch)
        return [row for row in rows.values() if row is not None]

    def _figures(self, peer: str, batch: int, report: Report) -> dict[str, Any]:
        line = report.of(batch)
        window = Window(*line["window"])
        if peer == "ours":
            self._ours[batch] = line
        ours = self._ours.get(batch)
        ms = line["ms_per_step"]
        kv = round(
            batch
            * window.context
            * self._model.config.kv_bytes_per_token(DTYPES[self._args.dtype].itemsize)
        )
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


def table_row(entry: dict[str, Any]) -> list[object]:
    """One line of the printed table."""
    same = entry["same_tokens"]
    return [
        entry["title"],
        entry["version"],
        entry["batch"],
        entry["ms_per_step"],
        *entry["ms_spread"],
        entry["tokens_per_s"],
        f"{entry['floor_share']:.0%}",
        entry["against_ours"],
        None if same is None else f"{same:.0%}",
        entry["method"],
        entry["mode"],
    ]


def markdown(entries: list[dict[str, Any]], batches: list[int]) -> str:
    """A line per peer, a column per batch: ms per step, and the share of the floor."""
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for entry in entries:
        cell = f"{entry['ms_per_step']:.3g} ({entry['floor_share']:.0%})"
        lines.setdefault((entry["title"], entry["version"]), {})[entry["batch"]] = cell
    header = ["ms per step (share of the floor)", "version", *(f"B={batch}" for batch in batches)]
    return markdown_table(
        header, [[*key, *(cells.get(batch) for batch in batches)] for key, cells in lines.items()]
    )


def _interpreter(text: str) -> tuple[str, str]:
    """ "vllm=/opt/vllm/bin/python" as its two parts."""
    peer, sign, path = text.partition("=")
    if not sign or peer not in CATALOG or not path:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected PEER=PATH with a peer of {', '.join(CATALOG)}"
        )
    return peer, path


def arguments(given: list[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--model",
        type=names,
        default=["qwen3-0.6b"],
        help=f"of {', '.join(SHAPES)}, or Hugging Face directories",
    )
    options.add_argument(
        "--peers", type=names, default=list(CATALOG), help=f"of {', '.join(CATALOG)}"
    )
    options.add_argument("--batches", type=integers, default=[1, 8, 32])
    options.add_argument("--new-tokens", type=positive_integer, default=512)
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    backend_option(options)
    options.add_argument(
        "--spin",
        action="store_true",
        help="ours waits for steps by spinning instead of yielding the CPU",
    )
    options.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: vLLM and SGLang make their own weights",
    )
    options.add_argument(
        "--python",
        type=_interpreter,
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="run a peer with the interpreter it is installed for",
    )
    options.add_argument(
        "--seconds",
        type=positive_number,
        default=10.0,
        help="for one batch of a peer, about; a slower one makes fewer tokens",
    )
    options.add_argument(
        "--folder",
        type=writable_folder,
        help="where checkpoints are written; default: shared memory if there is room",
    )
    options.add_argument(
        "--timeout", type=positive_number, default=600.0, help="seconds for one peer, all batches"
    )
    options.add_argument(
        "--floor-gib",
        type=positive_number,
        help="GiB that the floor sweep reads; default 9 on CUDA, 1 on a CPU",
    )
    options.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables here as Markdown"
    )
    args = options.parse_args(given)
    unknown = [peer for peer in args.peers if peer not in CATALOG]
    if unknown:
        options.error(f"--peers {', '.join(unknown)}: unknown; known are {', '.join(CATALOG)}")
    if args.new_tokens < 8:
        options.error(
            f"--new-tokens {args.new_tokens}: expected 8 or more, a window of three quarters of "
            "them is timed"
        )
    if args.device not in ("auto", "cpu", "cuda"):
        options.error(
            f"--device {args.device}: peers take auto, cpu or cuda; choose a GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    return args


def run_model(
    name: str, args: Namespace, device: str, bytes_per_s: float, result: ResultFile
) -> str:
    """Adds all peers of one model; returns the Markdown table."""
    measured: list[dict[str, Any]] = []
    try:
        with checkpoint(name, args.dtype, device, args.folder, args.timeout) as model:
            comparison = Comparison(model, args, device, bytes_per_s, result)
            for peer in sorted(args.peers, key=lambda peer: peer != "ours"):
                measured += comparison.add(peer)
    except (BenchmarkError, ModelError, OSError, ValueError) as error:
        message = str(error)

        def fail() -> dict[str, Any]:
            raise BenchmarkError(message)

        result.measure({"what": "checkpoint", "model": name}, fail)
    print(f"\n{name}, {args.dtype}", flush=True)
    if measured:
        print_table(HEADER, [table_row(entry) for entry in measured])
    return f"{name}, {args.dtype}:\n\n{markdown(measured, args.batches)}"


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    device = device_of(args.device).type
    result = ResultFile("peers", args, args.json)
    result.set(info=describe().splitlines())
    floor = result.measure(
        {"what": "floor"}, lambda: floor_rate(device, args.floor_gib, args.timeout)
    )
    if floor is None:
        return 1
    print(
        f"read floor {floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']}); torch "
        f"{torch.__version__}",
        flush=True,
    )
    texts = [run_model(name, args, device, floor["bytes_per_s"], result) for name in args.model]
    for entry in result.entries:
        if entry["status"] == "missing":
            print(f"{entry['model']}: {entry['title']} is missing: {entry['reason']}")
    if args.markdown is not None:
        write_text(args.markdown, "\n".join(texts))
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
