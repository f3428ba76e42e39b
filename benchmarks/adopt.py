"""The ladder: a loop as people write it, stage by stage into ours; equal tokens, ms per step, gap
share and lines changed at each stage.

    python -m benchmarks.adopt --loop stock,hf --model qwen3-0.6b --device cuda --json FILE

The stages are files that can be read and compared: benchmarks/ladder. Up to the graph they are the
steps of "pegainfer (4): From Pre-allocation to Graph Replay", 14.63, 13.58 and 12.29 ms a token
there (Qwen3-4B, bfloat16, RTX 5070 Ti). A stage that fails becomes an entry with its error, and the
ladder goes on. Everything is timed before anything is traced, because a profiler slows what runs
after it. With `--dtype bfloat16` the last stage has the kernels made for Hopper, where they run;
`--backend portable` takes them away.
"""

from __future__ import annotations

import gc
import math
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common.adopt_tables import ladder_section
from benchmarks.common.options import (
    DTYPES,
    backend_option,
    device_of,
    names,
    parser,
    running_kernels,
    use_hopper,
)
from benchmarks.common.progress import Progress
from benchmarks.common.result import ResultFile
from benchmarks.common.shapes import SHAPES
from benchmarks.ladder.measure import (
    WARM_UP,
    Subject,
    check_tokens,
    count_allocations,
    device_time,
    step_times,
    timed_run,
)
from benchmarks.ladder.models import build_model
from benchmarks.ladder.stages import LADDERS, Decode, Stage, changed
from benchmarks.ladder.verdict import Figures, verdict

MIN_TOKENS = 32  # three windows after the first one, and enough steps in half of it


class Ladder:
    """One loop's model and the stages that could be measured so far; `fast`: our step with the
    fast kernels.
    """

    def __init__(self, loop: str, subject: Subject, dtype: torch.dtype, fast: bool) -> None:
        self.loop, self.subject, self.dtype, self.fast = loop, subject, dtype, fast
        self.reference: list[int] | None = None
        self.steps: dict[Stage, dict[str, Any]] = {}
        self.records: dict[Stage, dict[str, Any]] = {}

    def time(self, stage: Stage, repeats: int) -> dict[str, Any]:
        """Tokens and times of a stage.

        Raises BenchmarkError where its tokens are not those of the first stage, in any of its runs.
        """
        decode = self._decode(stage)
        # libraries initialize themselves, outside of what is timed
        self.subject.run(decode, WARM_UP)
        runs = [timed_run(self.subject, decode) for _ in range(repeats)]
        expected = self.reference or runs[0].tokens
        equal = min(check_tokens(expected, run.tokens, self.dtype) for run in runs)
        self.reference = expected
        return {
            "tokens": len(expected),
            "tokens_equal": equal,
            "distinct_tokens": len(set(runs[0].tokens)),
            **step_times(runs),
        }

    def observe(self, stage: Stage) -> dict[str, Any]:
        """Allocations per step, and on CUDA the device's own time."""
        decode = self._decode(stage)
        allocations = {"allocations_per_step": count_allocations(self.subject, decode)}
        if self.subject.device.type != "cuda":
            return allocations
        return allocations | device_time(self.subject, decode, self.steps[stage]["ms_per_step"])

    def _decode(self, stage: Stage) -> Decode:
        return (
            partial(stage.decode, backend="hopper")
            if self.fast and stage.takes_backend
            else stage.decode
        )

    def figures(self, stage: Stage) -> Figures:
        """What `verdict` compares."""
        steps, records = self.steps[stage], self.records.get(stage, {})
        runs = steps["runs_ms_per_step"]
        return Figures(
            ms=steps["ms_per_step"],
            spread=(max(runs) - min(runs)) / 2 if len(runs) > 1 else math.inf,
            allocations=records.get("allocations_per_step"),
            kernel_ms=records.get("kernel_ms"),
            step_gap_ms=records.get("traced", {}).get("step_gap_ms"),
        )


def climb(ladder: Ladder, args: Namespace, result: ResultFile, progress: Progress) -> None:
    """Times every stage of a ladder, adding an entry for each."""
    below = ""
    for stage in LADDERS[ladder.loop]:
        progress.show(f"{ladder.loop} {stage.name}: steps")
        source = stage.path.read_text()
        lines = changed(below, source)
        labels = {
            "what": "steps",
            "loop": ladder.loop,
            "stage": stage.name,
            "changes": stage.what,
            "lines": lines._asdict(),
        }
        if stage.takes_backend:
            labels["kernels"] = args.kernels
        entry = result.measure(labels, partial(ladder.time, stage, args.repeats))
        below = source
        if entry is not None:
            ladder.steps[stage] = entry
            print(f"{ladder.loop} {stage.name}: {entry['ms_per_step']:.3g} ms/step", flush=True)
        if ladder.subject.device.type == "cuda" and not result.lost:
            gc.collect()  # pipelines are cycles
            torch.cuda.empty_cache()
        progress.step()


def observe(ladder: Ladder, result: ResultFile, progress: Progress) -> None:
    """Counts allocations and reads activity records of every stage that was timed, adding an
    entry for each.
    """
    for stage in ladder.steps:
        progress.show(f"{ladder.loop} {stage.name}: records")
        entry = result.measure(
            {"what": "records", "loop": ladder.loop, "stage": stage.name},
            partial(ladder.observe, stage),
        )
        if entry is not None:
            ladder.records[stage] = entry
        progress.step()


def judge(ladder: Ladder) -> None:
    """Gives every timed stage its sentence."""
    on_cpu = ladder.subject.device.type == "cpu"
    before: Figures | None = None
    for stage, steps in ladder.steps.items():
        after = ladder.figures(stage)
        steps["verdict"] = verdict(stage, before, after, on_cpu)
        before = after


def run(args: Namespace) -> ResultFile:
    """Measures the ladders that `args` asks for."""
    device, dtype = device_of(args.device), DTYPES[args.dtype]
    result = ResultFile("adopt", args, args.json)
    print(
        f"{args.model} (random weights), {args.dtype}, {device}; our step with {args.kernels} "
        "kernels"
    )
    prompt = [(7 * i + 3) % 250 for i in range(args.prompt)]
    ladders: list[Ladder] = []

    def build(loop: str) -> dict[str, Any]:
        model = build_model(loop, args.model, dtype, device, args.prompt + args.tokens)
        ladders.append(Ladder(loop, Subject(model, prompt, args.tokens), dtype, use_hopper(args)))
        return {}

    with Progress(2 * sum(len(LADDERS[loop]) for loop in args.loop)) as progress:
        for loop in args.loop:
            if (
                result.measure(
                    {"what": "model", "loop": loop, "model": args.model}, partial(build, loop)
                )
                is not None
            ):
                climb(ladders[-1], args, result, progress)
        for ladder in ladders:
            observe(ladder, result, progress)
            judge(ladder)
            result.set(finished=[each.loop for each in ladders[: ladders.index(ladder) + 1]])
            ladder_section(result.entries, ladder.loop).show()
    return result


def arguments(given: Sequence[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--loop", type=names, default=list(LADDERS), help=f"one or more of {', '.join(LADDERS)}"
    )
    options.add_argument(
        "--model", default="tiny", help="tiny, qwen3-0.6b, ...: a named shape, with random weights"
    )
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="float32: all tokens must be equal; else it is counted",
    )
    options.add_argument("--prompt", type=int, default=16, help="prompt tokens")
    options.add_argument(
        "--tokens",
        type=int,
        default=64,
        help=f"new tokens of each timed run, at least {MIN_TOKENS}",
    )
    backend_option(options)
    options.add_argument("--repeats", type=int, default=3, help="timed runs of each stage")
    args = options.parse_args(given)
    unknown = [loop for loop in args.loop if loop not in LADDERS]
    if unknown or not args.loop:
        options.error(f"--loop has {unknown or 'nothing'}; use one or more of {', '.join(LADDERS)}")
    if args.model not in SHAPES:
        options.error(f"--model {args.model!r} is unknown; use one of {', '.join(SHAPES)}")
    for name, least in (("tokens", MIN_TOKENS), ("prompt", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            options.error(f"--{name} is {getattr(args, name)}; use at least {least}")
    args.kernels = running_kernels(args)
    return args


def main(given: Sequence[str] | None = None) -> int:
    result = run(arguments(given))
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
