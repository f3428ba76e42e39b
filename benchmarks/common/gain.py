"""What depth 2 gained over depth 1: predicted from steady medians, observed from wall time, and what explains the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.common.result import BenchmarkError
from benchmarks.common.serving import Medians, Served, is_steady
from photon_ext.observe.cost_model import Periods, Prediction, Steps, Workload, predict, steps_per_request
from photon_ext.runtime.step import StepKind

TOLERANCE = 0.005  # half a point, or
TOLERANCE_SHARE = 0.1  # of the predicted gain, whichever is more


class Cause(Enum):
    """Where a run's wall time can differ from the model's."""

    RAMP = "ramp-up and ramp-down: decode steps of a batch that is not full"
    PREFILL = "prefill steps: more of them, or longer ones, than the model has"
    TURNOVER = "steps of zombies alone: more of them, or longer ones, than the model has"
    COUNT = "decode steps: another number of full ones than the model has"
    UNEVEN = "uneven steps: full decode steps whose mean is not the steady median (noise of the machine, longer contexts)"


def periods(found: Medians) -> Periods:
    """The model's input from a run's medians. Raises BenchmarkError where the run was too short to have any."""
    if found.decode is None or found.prefill is None:
        raise BenchmarkError(f"too few steady steps for medians ({found}); use more requests, or longer ones")
    return Periods(found.decode, found.prefill, found.dead or 0.0)


@dataclass(frozen=True)
class Side:
    """One depth: its steady periods, and the runs that were observed."""

    depth: int
    periods: Periods
    runs: Sequence[Served]

    @property
    def tokens_per_s(self) -> float:
        return sum(run.tokens for run in self.runs) / self.wall_s

    @property
    def wall_s(self) -> float:
        return sum(run.log.wall_s for run in self.runs)

    def full_tokens_per_s(self, streams: int) -> float:
        """Tokens/s up to the last step of a full batch; 0 where there was none."""
        tokens, seconds = 0, 0.0
        for run in self.runs:
            timed = run.log.intervals_ms()
            last = max((i for i, (step, _) in enumerate(timed) if is_steady(step, streams)), default=-1)
            tokens += sum(step.rows - step.zombies for step, _ in timed[: last + 1])
            seconds += sum(ms for _, ms in timed[: last + 1]) / 1e3
        return tokens / seconds if seconds else 0.0

    @property
    def requests(self) -> int:
        return sum(len(run.lengths) for run in self.runs)

    @property
    def mean_length(self) -> float:
        return sum(run.tokens for run in self.runs) / self.requests

    def excess_ms(self, work: Workload) -> dict[Cause, float]:
        """Wall time over the model's, by cause, milliseconds; the causes add up."""
        steps = steps_per_request(work, self.depth)
        extra = dict.fromkeys(Cause, 0.0)
        for run in self.runs:
            for cause, value in _excess_ms(run, self.periods, steps, work.streams).items():
                extra[cause] += value
        return extra


def _excess_ms(run: Served, own: Periods, steps: Steps, streams: int) -> dict[Cause, float]:
    time_of = dict.fromkeys(("steady", "ramp", "prefill", "dead"), 0.0)
    steady, ramp_rows = 0, 0
    for step, ms in run.log.intervals_ms():
        if step.kind is StepKind.PREFILL:
            time_of["prefill"] += ms
        elif step.dead:
            time_of["dead"] += ms
        elif is_steady(step, streams):
            time_of["steady"] += ms
            steady += 1
        else:
            time_of["ramp"] += ms
            ramp_rows += step.rows - step.zombies
    count, ramp = len(run.lengths), ramp_rows / streams  # as many full steps would have made the ramp's tokens
    return {
        Cause.RAMP: time_of["ramp"] - ramp * own.decode_ms,
        Cause.PREFILL: time_of["prefill"] - count * steps.prefill * own.prefill_ms,
        Cause.TURNOVER: time_of["dead"] - count * steps.dead * own.dead_ms,
        Cause.COUNT: (steady + ramp - count * steps.decode) * own.decode_ms,
        Cause.UNEVEN: time_of["steady"] - steady * own.decode_ms,
    }


@dataclass(frozen=True)
class Gain:
    """A prediction held against what was observed.

    Attributes:
        block, pipe: depth 1 and depth 2.
        work: streams and the observed L.
    """

    block: Side
    pipe: Side
    streams: int

    @property
    def work(self) -> Workload:
        return Workload(self.streams, self.pipe.mean_length)

    @property
    def prediction(self) -> Prediction:
        return predict(self.block.periods, self.pipe.periods, self.work)

    @property
    def observed(self) -> float:
        """Tokens/s at depth 2 over depth 1, minus 1, from wall time."""
        return self.pipe.tokens_per_s / self.block.tokens_per_s - 1

    @property
    def observed_full(self) -> float | None:
        """The same without the ramp-down: up to each depth's last step of a full batch. None where there was none."""
        block, pipe = (side.full_tokens_per_s(self.streams) for side in (self.block, self.pipe))
        return pipe / block - 1 if block and pipe else None

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, TOLERANCE_SHARE * abs(self.prediction.gain))

    @property
    def met(self) -> bool:
        return abs(self.observed - self.prediction.gain) <= self.tolerance

    @property
    def tokens_equal(self) -> bool:
        """Whether both depths generated the same tokens."""
        return [run.digest for run in self.block.runs] == [run.digest for run in self.pipe.runs]

    def effects(self) -> dict[Cause, float]:
        """What each cause adds to the observed gain; they add up to the whole difference where both depths made the same tokens."""
        work = self.work
        shares = []
        for side in (self.block, self.pipe):
            model = side.requests * steps_per_request(work, side.depth).time_ms(side.periods)
            shares.append({cause: ms / model for cause, ms in side.excess_ms(work).items()})
        scale = (1 + self.prediction.gain) / (1 + sum(shares[1].values()))
        return {cause: scale * (shares[0][cause] - shares[1][cause]) for cause in Cause}

    def explained(self) -> str:
        """The causes of a difference, the largest first, in points of gain."""
        off = self.observed - self.prediction.gain
        effects = sorted(self.effects().items(), key=lambda item: -item[1] * (1 if off > 0 else -1))
        named = [f"{points:+.1f} by {cause.value}" for cause, effect in effects if abs(points := effect * 100) >= 0.05 and effect * off > 0]
        full = "" if self.observed_full is None else f" ({self.observed_full:+.1%} while the batch was full)"
        return f"{off * 100:+.1f} points off{full}: " + ("; ".join(named[:2]) or "no single cause")

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        found = self.prediction
        return {
            "block_ms": found.block_ms,
            "pipe_ms": found.pipe_ms,
            "periods": {"block": vars(self.block.periods), "pipe": vars(self.pipe.periods)},
            "length": self.pipe.mean_length,
            "requests": self.pipe.requests,
            "rounds": len(self.pipe.runs),
            "stopped": sum(run.stopped for run in self.pipe.runs),
            "zombie_share": found.zombie_share,
            "formula": found.formula_gain,
            "predicted": found.gain,
            "observed": self.observed,
            "observed_full": self.observed_full,
            "tolerance": self.tolerance,
            "met": self.met,
            "cause": None if self.met else self.explained(),
            "effects": {cause.name.lower(): value for cause, value in self.effects().items()},
            "tokens_per_s": {"block": self.block.tokens_per_s, "pipe": self.pipe.tokens_per_s},
            "wall_s": {"block": self.block.wall_s, "pipe": self.pipe.wall_s},
            "tokens_equal": self.tokens_equal,
        }
