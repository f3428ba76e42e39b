"""What the CUDA runtime does in a steady decode step, counted by callbacks and from records.

    python -m benchmarks.activity --model qwen3-0.6b --batches 1,8,32 --steps 1000 --json FILE

Per step exactly one graph launch and one blocking wait are allowed; no other synchronizing call,
no allocation, no pageable copy; nothing is sent to the device in a quiet step. Each way of
counting is first shown planted calls, made through torch's CUDA runtime and through ours (which is
linked statically); a way that misses one is declared invalid. A count is a pass only if its way is
valid. `callbacks` are CUPTI's; `records` are torch.profiler's, which include all kernels, so that
it counts 200 steps at most.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common import options as cli
from benchmarks.common.kineto import counts as kineto_counts
from benchmarks.common.kineto import record
from benchmarks.common.models import open_model
from benchmarks.common.result import ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.common.session import Session, random_prompts
from benchmarks.cuda_calls.callbacks import ApiCounter
from benchmarks.cuda_calls.counts import Counts
from photon_ext import _C
from photon_ext.checks import Backend
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights
from photon_ext.observe.api import CallKind

PROMPT = 64
WARM_UP = 12
PLANT_STEPS = 4
SPARE = 16  # tokens beyond: no row may end while it is looked at
RECORDED_STEPS = 200  # whose records are read at once: the profiler's buffers are bounded
ALLOCATION = 1 << 30
Plant = Callable[[], object]
Count = Callable[[Session, int, Plant | None], Counts]


def count_callbacks(session: Session, steps: int, plant: Plant | None = None) -> Counts:
    """Counts `steps` steps with CUPTI callbacks; `plant` is called in the middle."""
    with ApiCounter() as counter:
        _steps(session, steps, plant)
    return counter.counts(steps)


def count_records(session: Session, steps: int, plant: Plant | None = None) -> Counts:
    """Counts up to RECORDED_STEPS steps from torch.profiler's records; `plant` as above."""
    steps = min(steps, RECORDED_STEPS)
    return kineto_counts(record(partial(_steps, session, steps, plant)), steps)


# In this order: torch.profiler keeps CUPTI to itself once it was used.
SOURCES: dict[str, Count] = {"callbacks": count_callbacks, "records": count_records}


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
    backend: Backend = "portable"


class Plants:
    """Calls that must not be in a steady step, made on purpose, and what shows that each was
    seen."""

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

        def waits(counts: Counts) -> bool:
            return counts.of(CallKind.EVENT_WAIT) == counts.steps + 1

        def sends(counts: Counts) -> bool:
            sizes = (None, target.nbytes)
            return counts.host_to_device == 1 and counts.host_to_device_bytes in sizes

        def syncs(counts: Counts) -> bool:
            return counts.of(CallKind.SYNC) >= 1

        copy_in = partial(streams.in_copy.copy, target.data_ptr(), pinned.ptr, target.nbytes)
        self._pinned = pinned  # as long as it is copied from
        self.calls: dict[str, tuple[Plant, Callable[[Counts], bool]]] = {
            "torch.cuda.synchronize()": (torch.cuda.synchronize, syncs),
            "our stream.synchronize()": (streams.out_copy.synchronize, syncs),
            "our event.synchronize()": (event_wait, waits),
            "torch pageable copy": (partial(target.copy_, pageable), lambda c: c.pageable >= 1),
            "our pinned copy": (copy_in, sends),
            "torch allocation": (allocate, lambda c: c.of(CallKind.ALLOCATION) >= 1),
        }

    def seen(self, session: Session, count: Count) -> dict[str, bool]:
        """Which planted calls `count` sees."""
        count(session, PLANT_STEPS, None)  # what a first use sets up is not looked at
        return {
            label: is_seen(count(session, PLANT_STEPS, call))
            for label, (call, is_seen) in self.calls.items()
        }


def count_steps(model: Model, batch: int, source: str, steps: int) -> dict[str, Any]:
    """Counts at depth 2: the planted calls first, then the steady window."""
    count, prompts = SOURCES[source], random_prompts(model.config.vocab, batch, PROMPT)
    room = steps + 3 * WARM_UP + 7 * PLANT_STEPS + SPARE
    given = (model.config, model.weights, prompts, room)
    with Session(*given, depth=2, backend=model.backend) as session:
        session.begin(WARM_UP)
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


def count_all(models: list[Model], args: Namespace, result: ResultFile) -> None:
    """Adds a count of every model and batch, by every way."""
    for source in sorted(args.sources, key=list(SOURCES).index):
        for model in models:
            for batch in args.batches:
                labels = {"what": "counts", "model": model.name, "batch": batch, "depth": 2}
                count = partial(count_steps, model, batch, source, args.steps)
                entry = result.measure({**labels, "way": source}, count)
                if entry is None:
                    continue
                seen = entry["planted_seen"]
                missed = [f"planted {label} not seen" for label in seen if not seen[label]]
                for problem in (*missed, *entry["faults"]):
                    print(f"{model.name} B={batch} {source}: {problem}", flush=True)
    for table in tables_of(result.data):
        table.show()


def main(given: list[str] | None = None) -> int:
    options = cli.parser(__doc__.splitlines()[0])
    cli.models_option(options)
    add, known = options.add_argument, ", ".join(SOURCES)
    add("--batches", type=cli.integers, default=[1, 8, 32])
    add("--dtype", choices=cli.DTYPES, default="bfloat16")
    add("--steps", type=cli.positive_integer, default=1000, help="steps per count")
    cli.backend_option(options)
    add("--sources", type=cli.names, default=list(SOURCES), help=f"of {known}")
    args = options.parse_args(given)
    args.model = args.model or ["qwen3-0.6b"]
    args.kernels = cli.running_kernels(args)
    unknown = [source for source in args.sources if source not in SOURCES]
    if unknown:
        options.error(f"--sources: {unknown[0]!r} is not one of {known}")
    result, device = ResultFile("activity", args, args.json), cli.device_of(args.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        print("benchmarks.activity counts CUDA calls: it needs a GPU; nothing was measured")
        result.set(skipped="no GPU")
        return 0
    backend, dtype = cli.backend_of(args), cli.DTYPES[args.dtype]
    models = [Model(name, *open_model(name, dtype, device), backend) for name in args.model]
    count_all(models, args, result)
    passed = (entry["status"] == "ok" and entry.get("passed", True) for entry in result.entries)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
