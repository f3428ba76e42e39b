"""What depth 2 gained over depth 1: predicted from steady medians, observed from wall time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.attribution.serving import Served
from benchmarks.attribution.steady import Medians
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
    def gap_us(self) -> dict[str, float] | None:
        """Median and 99th percentile of the observed runs' step gaps; None without timing."""
        found = [step.gap_us for run in self.runs for step in run.log.steps]
        gaps = [us for us in found if us is not None]
        return {f"p{p}": percentile(gaps, p / 100) for p in (50, 99)} if gaps else None

    def steps_of(self, kind: StepKind) -> float:
        """Observed steps of a kind, by request."""
        steps = (step for run in self.runs for step in run.log.steps)
        return sum(step.kind is kind and not step.dead for step in steps) / self.requests


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
