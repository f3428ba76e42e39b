"""The ladder: a Hugging Face model's loop, stage by stage into ours, with figures at each stage.

    python -m benchmarks.adopt --model qwen3-0.6b --device cuda --json FILE

The stages are files that can be read and compared: benchmarks/ladder/stages. Up to the graph they
are the steps of "pegainfer (4): From Pre-allocation to Graph Replay", 14.63, 13.58 and 12.29 ms a
token there (Qwen3-4B, bfloat16, RTX 5070 Ti). A stage that fails becomes an entry with its error,
and the ladder goes on. Everything is timed before anything is traced, because a profiler slows what
runs after it. With `--dtype bfloat16` the last stage has the kernels made for Hopper, where they
run; `--backend portable` takes them away.
"""

from __future__ import annotations

import gc
import math
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import options as cli
from benchmarks.common.models import SHAPES
from benchmarks.common.result import ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.ladder import measure
from benchmarks.ladder.models import build_model
from benchmarks.ladder.stages import STAGES, Decode, Stage
from benchmarks.ladder.verdict import Figures, verdict
from photon_ext.checks import Backend

ON_GPU = {"tokens": 64, "repeats": 3}
ON_CPU = {"tokens": 40, "repeats": 2}
MIN_TOKENS = 32  # three windows after the first one, and enough steps in half of it


class Ladder:
    """The model and the stages that could be measured so far; `backend`: whose kernels our step
    has."""

    def __init__(self, subject: measure.Subject, dtype: torch.dtype, backend: Backend) -> None:
        self.subject, self.dtype, self.backend = subject, dtype, backend
        self.reference: list[int] | None = None
        self.steps: dict[Stage, dict[str, Any]] = {}
        self.records: dict[Stage, dict[str, Any]] = {}

    def time(self, stage: Stage, repeats: int) -> dict[str, Any]:
        """Tokens and times of a stage. Raises BenchmarkError where its tokens are not those of the
        first stage, in any of its runs."""
        decode = self._decode(stage)
        # libraries initialize themselves, outside of what is timed
        self.subject.run(decode, measure.WARM_UP)
        runs = [measure.timed_run(self.subject, decode) for _ in range(repeats)]
        expected = self.reference or runs[0].tokens
        equal = min(measure.check_tokens(expected, run.tokens, self.dtype) for run in runs)
        self.reference = expected
        return {
            "tokens": len(expected),
            "tokens_equal": equal,
            "distinct_tokens": len(set(runs[0].tokens)),
            **measure.step_times(runs),
        }

    def observe(self, stage: Stage) -> dict[str, Any]:
        """Allocations per step, and on CUDA the device's own time."""
        decode = self._decode(stage)
        allocations = {"allocations_per_step": measure.count_allocations(self.subject, decode)}
        if self.subject.device.type != "cuda":
            return allocations
        return allocations | measure.device_time(
            self.subject, decode, self.steps[stage]["ms_per_step"]
        )

    def _decode(self, stage: Stage) -> Decode:
        if not stage.takes_backend:
            return stage.decode
        return partial(stage.decode, backend=self.backend)

    def figures(self, stage: Stage) -> Figures:
        """What `verdict` compares."""
        steps, records = self.steps[stage], self.records.get(stage, {})
        runs = steps["runs_ms_per_step"]
        return Figures(
            ms=steps["ms_per_step"],
            spread=(max(runs) - min(runs)) / 2 if len(runs) > 1 else math.inf,
            kernel_ms=records.get("kernel_ms"),
        )


def climb(ladder: Ladder, args: Namespace, result: ResultFile) -> None:
    """Times every stage, adding an entry for each."""
    for stage in STAGES:
        labels = {"what": "steps", "stage": stage.name, "changes": stage.what}
        if stage.takes_backend:
            labels["kernels"] = args.kernels
        entry = result.measure(labels, partial(ladder.time, stage, args.repeats))
        if entry is not None:
            ladder.steps[stage] = entry
        if ladder.subject.device.type == "cuda" and not result.lost:
            gc.collect()  # pipelines are cycles
            torch.cuda.empty_cache()


def observe(ladder: Ladder, result: ResultFile) -> None:
    """Adds allocations and activity records of every stage that was timed; gives each its
    sentence."""
    before: Figures | None = None
    for stage, steps in ladder.steps.items():
        labels = {"what": "records", "stage": stage.name}
        entry = result.measure(labels, partial(ladder.observe, stage))
        if entry is not None:
            ladder.records[stage] = entry
        after = ladder.figures(stage)
        steps["verdict"] = verdict(before, after)
        before = after


def run(args: Namespace) -> ResultFile:
    """Measures the ladder."""
    device, dtype = cli.device_of(args.device), cli.DTYPES[args.dtype]
    result = ResultFile("adopt", args, args.json)
    if device.type == "cpu" and args.model == "tiny":
        torch.set_num_threads(1)  # more would wait for each other longer than they work
    print(
        f"{args.model} (random weights), {args.dtype}, {device}; "
        f"our step with {args.kernels} kernels"
    )
    prompt = [(7 * i + 3) % 250 for i in range(args.prompt)]
    ladders: list[Ladder] = []

    def build() -> dict[str, Any]:
        model = build_model(args.model, dtype, device, args.prompt + args.tokens)
        subject = measure.Subject(model, prompt, args.tokens)
        ladders.append(Ladder(subject, dtype, cli.backend_of(args)))
        return {}

    if result.measure({"what": "model", "model": args.model}, build) is not None:
        climb(ladders[0], args, result)
        observe(ladders[0], result)
        result.set(finished=True)
    for table in tables_of(result.data):
        table.show()
    return result


def arguments(given: Sequence[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--model", default="tiny", help="a named shape, with random weights")
    add(
        "--dtype",
        choices=cli.DTYPES,
        default="float32",
        help="float32: all tokens must be equal; else it is counted how many are",
    )
    add("--prompt", type=int, default=16, help="prompt tokens")
    add("--tokens", type=int, help=f"new tokens of each timed run, at least {MIN_TOKENS}")
    cli.backend_option(options)
    add("--repeats", type=int, help="timed runs of each stage")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    if args.model not in SHAPES:
        options.error(f"--model {args.model!r} is unknown; use one of {', '.join(SHAPES)}")
    for name, least in (("tokens", MIN_TOKENS), ("prompt", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            options.error(f"--{name} is {getattr(args, name)}; use at least {least}")
    args.kernels = cli.running_kernels(args)
    return args


def main(given: Sequence[str] | None = None) -> int:
    result = run(arguments(given))
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
