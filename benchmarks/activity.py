"""What the CUDA runtime does in a steady decode step, counted from activity records and from CUPTI
callbacks.

    python -m benchmarks.activity --model qwen3-0.6b --batches 1,8,32 --steps 1000 --json FILE

Per step exactly one graph launch and one blocking wait are allowed; no other synchronizing call, no
allocation, no pageable copy; nothing is sent to the device in a quiet step. Each way of counting is
first shown planted calls, made through torch's CUDA runtime and through ours (which is linked
statically); a way that misses one is declared invalid. A count is a pass only if its way is valid.
`profiler`, the records as torch.profiler hands them on, with those of all kernels, takes a minute
for what `records` does in seconds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common.activity_records import ActivityRecords
from benchmarks.common.api_counter import ApiCounter
from benchmarks.common.calls import Counts
from benchmarks.common.options import (
    DTYPES,
    backend_option,
    device_of,
    integers,
    models_option,
    names,
    parser,
    positive_integer,
    running_kernels,
    use_hopper,
)
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.session import Session, random_prompts
from benchmarks.common.shapes import open_model
from benchmarks.common.table import print_table
from benchmarks.common.trace import counts as trace_counts
from benchmarks.common.trace import idle, record
from photon_ext import _C
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights
from photon_ext.observe.api import CallKind

PROMPT = 64
WARM_UP = 12
PLANT_STEPS = 4
WINDOW_STEPS = 200  # whose records are read at once: buffers are bounded
GAP_STEPS = 40
ALLOCATION = 1 << 30
HEADER = (
    "model",
    "B",
    "source",
    "steps",
    "valid",
    "launches",
    "waits",
    "syncs",
    "allocs",
    "pageable",
    "HtoD bytes",
    "quiet",
    "verdict",
)

Plant = Callable[[], object]
Count = Callable[[Session, int, Plant | None], Counts]


def count_callbacks(session: Session, steps: int, plant: Plant | None = None) -> Counts:
    """Counts `steps` steps with CUPTI callbacks; `plant` is called in the middle."""
    with ApiCounter() as counter:
        _steps(session, steps, plant)
    return counter.counts(steps)


def count_records(session: Session, steps: int, plant: Plant | None = None) -> Counts:
    """Counts `steps` steps from CUPTI's activity records; `plant` is called in the middle."""
    return _in_windows("activity records", partial(_records_of_window, session), steps, plant)


def count_profile(session: Session, steps: int, plant: Plant | None = None) -> Counts:
    """Counts `steps` steps from the records of torch.profiler; `plant` is called in the middle."""
    return _in_windows("torch.profiler", partial(_profile_of_window, session), steps, plant)


# In this order: torch.profiler keeps CUPTI to itself once it was used.
SOURCES: dict[str, Count] = {
    "callbacks": count_callbacks,
    "records": count_records,
    "profiler": count_profile,
}
DEFAULT_SOURCES = ["callbacks", "records"]


def _records_of_window(session: Session, steps: int, plant: Plant | None) -> Counts:
    with ActivityRecords(torch.cuda.synchronize) as records:
        _steps(session, steps, plant)
    return records.counts(steps)


def _profile_of_window(session: Session, steps: int, plant: Plant | None) -> Counts:
    return trace_counts(record(partial(_steps, session, steps, plant)), steps)


def _in_windows(
    source: str, count: Callable[[int, Plant | None], Counts], steps: int, plant: Plant | None
) -> Counts:
    """All steps, a window at a time."""
    total = Counts(source, 0)
    while total.steps < steps:
        total.add(count(min(WINDOW_STEPS, steps - total.steps), plant))
    return total


def _steps(session: Session, steps: int, plant: Plant | None) -> None:
    for step in range(steps):
        if plant is not None and step == steps // 2:
            plant()
        session.step()


class Model(NamedTuple):
    """A model on the device."""

    name: str
    config: ModelConfig
    weights: DecoderWeights
    fast: bool = False


class Plants:
    """Calls that must not be in a steady step, made on purpose, and what shows that each was
    seen.
    """

    def __init__(self, session: Session) -> None:
        device = session.runtime.device
        streams = session.runtime.streams
        target = torch.zeros(16, dtype=torch.int32, device=device)
        pageable = torch.ones(16, dtype=torch.int32)
        pinned = _C.PinnedBuffer(target.nbytes, "cuda")
        event = _C.Event("cuda")

        def event_wait() -> None:
            streams.out_copy.record(event)
            event.synchronize()

        def allocate() -> None:
            torch.cuda.empty_cache()
            torch.empty(ALLOCATION, dtype=torch.uint8, device=device)

        self.calls: dict[str, tuple[Plant, Callable[[Counts], bool]]] = {
            "torch.cuda.synchronize()": (
                torch.cuda.synchronize,
                lambda counts: counts.of(CallKind.SYNC) >= 1,
            ),
            "our stream.synchronize()": (
                streams.out_copy.synchronize,
                lambda counts: counts.of(CallKind.SYNC) >= 1,
            ),
            "our event.synchronize()": (
                event_wait,
                lambda counts: counts.of(CallKind.EVENT_WAIT) == counts.steps + 1,
            ),
            "torch pageable copy": (
                lambda: target.copy_(pageable),
                lambda counts: counts.pageable >= 1,
            ),
            "our pinned copy": (
                lambda: streams.in_copy.copy(target.data_ptr(), pinned.ptr, target.nbytes),
                lambda counts: (
                    counts.host_to_device == 1
                    and counts.host_to_device_bytes in (None, target.nbytes)
                ),
            ),
            "torch allocation": (allocate, lambda counts: counts.of(CallKind.ALLOCATION) >= 1),
        }

    def seen(self, session: Session, count: Count) -> dict[str, bool]:
        """Which planted calls `count` sees."""
        count(session, PLANT_STEPS, None)  # what a first use sets up is not looked at
        return {
            label: is_seen(count(session, PLANT_STEPS, call))
            for label, (call, is_seen) in self.calls.items()
        }


def open_session(model: Model, batch: int, depth: int, steps: int) -> Session:
    """A warm session with room for `steps` more steps."""
    prompts = random_prompts(model.config.vocab, batch, PROMPT)
    session = Session(
        model.config, model.weights, prompts, WARM_UP + steps + 16, depth=depth, fast=model.fast
    )
    session.prefill()
    session.run(WARM_UP)
    return session


def count_steps(model: Model, batch: int, source: str, steps: int) -> dict[str, Any]:
    """Counts at depth 2: the planted calls first, then the steady window."""
    count = SOURCES[source]
    with open_session(model, batch, 2, steps + 2 * WARM_UP + 7 * PLANT_STEPS) as session:
        seen = Plants(session).seen(session, count)
        session.run(WARM_UP)
        quiet = session.pipeline.stats.quiet_steps
        counted = count(session, steps, None)
        quiet = session.pipeline.stats.quiet_steps - quiet
        session.check()
    faults = counted.faults(quiet)
    return {
        "planted_seen": seen,
        "valid": all(seen.values()),
        "quiet_steps": quiet,
        "faults": faults,
        "passed": all(seen.values()) and not faults,
        **counted.as_dict(),
    }


def traced_gaps(model: Model, batch: int, depth: int) -> dict[str, Any]:
    """Step gap and node gap from kernel records."""
    with open_session(model, batch, depth, GAP_STEPS) as session:
        found = idle(record(lambda: session.run(GAP_STEPS)))
    if not found:
        raise BenchmarkError("the profile holds no kernel records of at least two steps")
    return found


def count_all(models: list[Model], args: Namespace, result: ResultFile) -> None:
    """Adds a count of every model and batch, by every way."""
    rows = []
    for source in sorted(args.sources, key=list(SOURCES).index):
        for model in models:
            for batch in args.batches:
                labels = {
                    "what": "counts",
                    "model": model.name,
                    "batch": batch,
                    "depth": 2,
                    "way": source,
                }
                entry = result.measure(
                    labels, partial(count_steps, model, batch, source, args.steps)
                )
                if entry is None:
                    continue
                rows.append(table_row(entry))
                missed = [
                    f"planted {label} not seen"
                    for label, seen in entry["planted_seen"].items()
                    if not seen
                ]
                for problem in (*missed, *entry["faults"]):
                    print(f"{model.name} B={batch} {source}: {problem}", flush=True)
    if rows:
        print_table(HEADER, rows)


def trace_gaps(models: list[Model], args: Namespace, result: ResultFile) -> None:
    """Adds step gap and node gap from kernel records, at depth 1 and 2."""
    rows = []
    for model in models:
        for batch in args.batches:
            for depth in (1, 2):
                labels = {
                    "what": "traced gaps",
                    "model": model.name,
                    "batch": batch,
                    "depth": depth,
                }
                entry = result.measure(labels, partial(traced_gaps, model, batch, depth))
                if entry is not None:
                    gap, figures = (
                        entry["step_gap_us"],
                        [entry[name] for name in ("step_us", "node_gap_us", "kernels")],
                    )
                    rows.append([model.name, batch, depth, gap["median"], gap["p99"], *figures])
    if rows:
        print_table(
            ("model", "B", "depth", "step gap us", "p99", "step us", "node gap us", "kernels"), rows
        )


def table_row(entry: dict[str, Any]) -> list[object]:
    """One line of the printed table."""
    kinds, steps = entry["kinds"], entry["steps"]
    return [
        entry["model"],
        entry["batch"],
        entry["way"],
        steps,
        "yes" if entry["valid"] else "NO",
        kinds["graph launch"],
        kinds["event wait"],
        kinds["sync"],
        kinds["allocation"],
        sum(count for copy, count in entry["copies"].items() if "Pageable" in copy),
        entry["host_to_device_bytes"],
        f"{entry['quiet_steps']}/{steps}",
        "pass" if entry["passed"] else "FAIL",
    ]


def main(given: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    models_option(options)
    options.add_argument("--batches", type=integers, default=[1, 8, 32])
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options.add_argument("--steps", type=positive_integer, default=1000, help="steps per count")
    backend_option(options)
    options.add_argument(
        "--sources", type=names, default=DEFAULT_SOURCES, help=f"of {', '.join(SOURCES)}"
    )
    options.add_argument(
        "--no-gaps",
        dest="gaps",
        action="store_false",
        help="skip the step gaps from kernel records",
    )
    args = options.parse_args(given)
    args.kernels = running_kernels(args)
    unknown = [source for source in args.sources if source not in SOURCES]
    if unknown:
        options.error(f"--sources: {unknown[0]!r} is not one of {', '.join(SOURCES)}")
    result = ResultFile("activity", args, args.json)
    if device_of(args.device).type != "cuda" or not torch.cuda.is_available():
        print("benchmarks.activity counts CUDA calls: it needs a GPU; nothing was measured")
        result.set(skipped="no GPU")
        return 0
    models = [
        Model(name, *open_model(name, DTYPES[args.dtype], device_of(args.device)), use_hopper(args))
        for name in args.model
    ]
    count_all(models, args, result)
    if args.gaps:
        trace_gaps(models, args, result)
    return (
        0
        if all(entry["status"] == "ok" and entry.get("passed", True) for entry in result.entries)
        else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
