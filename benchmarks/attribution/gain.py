"""What depth 2 gained over depth 1: predicted from steady medians, observed from wall time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.attribution.serving import Served
from benchmarks.attribution.steady import Medians, device_and_gap, ordinary_steps
from benchmarks.attribution.steps import StepRecord
from benchmarks.common.prefill_groups import prefill_groups
from benchmarks.common.result import BenchmarkError
from photon_ext.observe.cost_model import (
    Periods,
    Prediction,
    Workload,
    predict,
    steps_per_request,
)

TOLERANCE = 0.005  # half a point, or
TOLERANCE_SHARE = 0.1  # of the predicted gain, whichever is more
LEAST = 0.0005  # gain that is worth naming
CAUSES = {
    "ordinary_device": "the device's part of ordinary steps",
    "ordinary_host": "the host's part of ordinary steps: wake-up, commit, plan",
}
SHOWN_BY = {"ordinary_device": "median time on the device", "ordinary_host": "median gap"}
OTHERWISE = "what is left are ramp-up and ramp-down, prefill steps and single long steps"


def periods(found: Medians, groups: Mapping[int, float]) -> Periods:
    """The model's input from medians; `groups`: see `prefill_groups`.

    Raises BenchmarkError where the run was too short to have medians.
    """
    decode, prefill = found.decode, found.mean_prefill(groups)
    if decode is None or prefill is None:
        raise BenchmarkError(
            f"too few steady steps for medians ({found}); use more requests, or longer ones"
        )
    return Periods(decode, prefill, found.dead or 0.0)


@dataclass(frozen=True)
class Side:
    """One depth: its steady medians, the runs that were observed, and sequences at once."""

    depth: int
    usual: Medians
    runs: Sequence[Served]
    streams: int

    @property
    def periods(self) -> Periods:
        return periods(self.usual, prefill_groups(self.work, self.depth))

    @property
    def work(self) -> Workload:
        """What was asked of it, by the observed L."""
        return Workload(self.streams, sum(run.tokens for run in self.runs) / self.requests)

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
        return sum(step.steady(self.streams) for run in self.runs for step in run.log.steps)

    @property
    def model_ms(self) -> float:
        """The wall time that the medians predict."""
        return self.requests * steps_per_request(self.work, self.depth).time_ms(self.periods)

    def compared(self) -> dict[str, dict[str, float]]:
        """Ordinary steps here and in the run of the medians ("there"), milliseconds by cause;
        empty without timing."""
        ordinary: list[StepRecord] = []
        for run in self.runs:
            ordinary += ordinary_steps(run.log, self.streams)
        there = self.usual.device, self.usual.gap
        pairs = zip(CAUSES, device_and_gap(ordinary), there, strict=True)
        return {
            cause: {"here": now, "there": before}
            for cause, now, before in pairs
            if now is not None and before is not None
        }


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
        """By cause, what ordinary steps that are not like the medians add to the observed gain.

        `points` is the gain (1 is 100 %); of each depth: how many steps, and their milliseconds
        over the medians. The cause with the largest effect comes first.
        """
        sides = {"block": self.block, "pipe": self.pipe}
        compared = {name: side.compared() for name, side in sides.items()}
        found = {}
        for cause in CAUSES:
            if any(cause not in each for each in compared.values()):
                continue
            excess, share = {}, {}
            for name, side in sides.items():
                median_ms = compared[name][cause]
                ms = side.full_steps * (median_ms["here"] - median_ms["there"])
                excess[name] = {"steps": side.full_steps, "ms": ms}
                share[name] = ms / side.model_ms
            found[cause] = {
                "cause": CAUSES[cause],
                "points": (1 + self.prediction.gain) * (share["block"] - share["pipe"]),
                **excess,
                "medians": {
                    "of": SHOWN_BY[cause],
                    **{name: compared[name][cause] for name in sides},
                },
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

    def _digests(self, side: Side) -> list[int]:
        return [run.digest for run in side.runs]
