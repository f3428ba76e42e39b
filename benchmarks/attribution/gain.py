"""What depth 2 gained over depth 1: predicted from steady medians, observed from wall time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.attribution.serving import Served
from benchmarks.attribution.steady import Medians, medians
from benchmarks.common.result import BenchmarkError
from photon_ext.observe.cost_model import (
    Periods,
    Prediction,
    Workload,
    predict,
    steps_per_request,
)
from photon_ext.observe.meter import percentile
from photon_ext.runtime.step import StepKind

TOLERANCE = 0.005  # half a point, or
TOLERANCE_SHARE = 0.1  # of the predicted gain, whichever is more
LEAST = 0.0005  # gain that is worth naming
# By name in a result: the field of Medians, what it is in words, and what shows it.
CAUSES = {
    "ordinary_device": (
        "device",
        "the device's part of ordinary steps",
        "median time on the device",
    ),
    "ordinary_host": (
        "gap",
        "the host's part of ordinary steps: wake-up, commit, plan",
        "median gap",
    ),
}
OTHERWISE = "what is left are ramp-up and ramp-down, prefill steps and single long steps"


def periods(found: Medians) -> Periods:
    """The model's input from medians.

    Raises BenchmarkError where the run was too short to have medians.
    """
    if found.decode is None or found.prefill is None:
        raise BenchmarkError(
            f"too few steady steps for medians ({found}); use more requests, or longer ones"
        )
    return Periods(found.decode, found.prefill, found.dead or 0.0)


@dataclass(frozen=True)
class Side:
    """One depth: its steady medians, the runs that were observed, and sequences at once; of answers
    that end by their cap, the prefill steps of a prompt.
    """

    depth: int
    usual: Medians
    runs: Sequence[Served]
    streams: int
    prompt_steps: float | None = None

    @property
    def periods(self) -> Periods:
        return periods(self.usual)

    @cached_property
    def here(self) -> Medians:
        """The medians of the observed runs."""
        return medians([run.log for run in self.runs], self.full)

    @property
    def full(self) -> int:
        """Rows of a full batch: of short answers that end by their cap, any."""
        return self.streams if self.prompt_steps is None else 1

    @property
    def work(self) -> Workload:
        """What was asked of it, by the observed L."""
        length = sum(run.tokens for run in self.runs) / self.requests
        return Workload(self.streams, length, self.prompt_steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(run.tokens for run in self.runs) / self.wall_s

    @property
    def wall_s(self) -> float:
        return sum(run.log.wall_s for run in self.runs)

    @property
    def requests(self) -> int:
        return sum(len(run.lengths) for run in self.runs)

    @property
    def full_steps(self) -> int:
        """Decode steps of a full batch."""
        return sum(step.steady(self.full) for run in self.runs for step in run.log.steps)

    @property
    def gap_us(self) -> dict[str, float] | None:
        """Median and 99th percentile of the observed runs' step gaps; None without timing."""
        found = [step.gap_us for run in self.runs for step in run.log.steps]
        gaps = [us for us in found if us is not None]
        return {f"p{p}": percentile(gaps, p / 100) for p in (50, 99)} if gaps else None

    def steps_of(self, kind: StepKind) -> float:
        """Observed steps of a kind, by request."""
        steps = (step for run in self.runs for step in run.log.steps)
        return sum(step.kind is kind and not step.dead for step in steps) / self.requests

    @property
    def model_ms(self) -> float:
        """The wall time that the medians predict."""
        return self.requests * steps_per_request(self.work, self.depth).time_ms(self.periods)


@dataclass(frozen=True)
class Gain:
    """A prediction held against what was observed; `block` and `pipe` are depth 1 and depth 2."""

    block: Side
    pipe: Side

    @property
    def prediction(self) -> Prediction:
        return predict(self.block.periods, self.pipe.periods, self.pipe.work)

    @property
    def observed(self) -> float:
        """Tokens/s at depth 2 over depth 1, minus 1, from wall time."""
        return self.pipe.tokens_per_s / self.block.tokens_per_s - 1

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, TOLERANCE_SHARE * abs(self.prediction.gain))

    @property
    def met(self) -> bool:
        return abs(self.observed - self.prediction.gain) <= self.tolerance

    def effects(self) -> dict[str, dict[str, Any]]:
        """By cause, what ordinary steps that are not like the medians add to the observed gain;
        empty without timing.

        `points` is the gain (1 is 100 %); of each depth: how many steps, and their milliseconds
        over the medians, which are given here and in the run of the medians ("there").
        """
        sides, found = {"block": self.block, "pipe": self.pipe}, {}
        for name, (field, cause, shown_by) in CAUSES.items():
            pairs = {k: (getattr(s.here, field), getattr(s.usual, field)) for k, s in sides.items()}
            if any(None in pair for pair in pairs.values()):
                continue
            over = {
                key: side.full_steps * (pairs[key][0] - pairs[key][1])
                for key, side in sides.items()
            }
            share = {key: over[key] / side.model_ms for key, side in sides.items()}
            shown = {key: {"here": here, "there": there} for key, (here, there) in pairs.items()}
            found[name] = {
                "cause": cause,
                "points": (1 + self.prediction.gain) * (share["block"] - share["pipe"]),
                **{key: {"steps": s.full_steps, "ms": over[key]} for key, s in sides.items()},
                "medians": {"of": shown_by, **shown},
            }
        return dict(sorted(found.items(), key=lambda item: -abs(item[1]["points"])))

    def explained(self) -> str:
        """The difference, and what of it ordinary steps explain, in points of gain."""
        off = self.observed - self.prediction.gain
        named = [
            f"{effect['points'] * 100:+.1f} by {effect['cause']}"
            for effect in self.effects().values()
            if effect["points"] * off > 0 and abs(effect["points"]) >= LEAST
        ]
        return f"{off * 100:+.1f} points off: {'; '.join([*named, OTHERWISE])}"

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        found, sides = self.prediction, {"block": self.block, "pipe": self.pipe}
        return {
            "block_ms": found.block_ms,
            "pipe_ms": found.pipe_ms,
            "parts": self._parts(),
            "periods": {name: vars(side.periods) for name, side in sides.items()},
            "medians": {name: side.usual._asdict() for name, side in sides.items()},
            "length": self.pipe.work.tokens_per_request,
            "requests": self.pipe.requests,
            "rounds": len(self.pipe.runs),
            "capped": self.pipe.prompt_steps is not None,
            "gaps_us": {name: side.gap_us for name, side in sides.items()},
            "steps": {name: self._steps(side) for name, side in sides.items()},
            "stopped": sum(run.stopped for run in self.pipe.runs),
            "zombie_share": found.zombie_share,
            "formula": found.formula_gain,
            "predicted": found.gain,
            "observed": self.observed,
            "tolerance": self.tolerance,
            "met": self.met,
            "cause": None if self.met else self.explained(),
            "effects": self.effects(),
            "tokens_per_s": {name: side.tokens_per_s for name, side in sides.items()},
            "wall_s": {name: side.wall_s for name, side in sides.items()},
            "tokens_equal": self._digests(self.block) == self._digests(self.pipe),
            "verdict": found.verdict,
        }

    def _parts(self) -> dict[str, float | None]:
        """A pipelined step taken apart; None without timing."""
        usual = self.pipe.usual
        period, device, gap = self.pipe.periods.decode_ms, usual.device, usual.gap
        return {
            "device_ms": device,
            "period_ms": period,
            "left_over_us": None if device is None else (period - device) * 1e3,
            "gap_us": None if gap is None else gap * 1e3,
        }

    def _steps(self, side: Side) -> dict[str, dict[str, float]]:
        """Steps by request: as counted, and as the model has them."""
        model = steps_per_request(side.work, side.depth)
        return {
            "decode": {"here": side.steps_of(StepKind.DECODE), "model": model.decode},
            "prefill": {"here": side.steps_of(StepKind.PREFILL), "model": model.prefill},
        }

    def _digests(self, side: Side) -> list[int]:
        return [run.digest for run in side.runs]
