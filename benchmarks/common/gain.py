"""What depth 2 gained over depth 1: predicted from steady medians, observed from wall time, and
what explains the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.common.calibration import COLLECTED, Calibration
from benchmarks.common.cause import Cause, Excess, Tally
from benchmarks.common.compared import Compared
from benchmarks.common.course import course
from benchmarks.common.prefill_groups import prefill_groups
from benchmarks.common.result import BenchmarkError
from benchmarks.common.serving import Served
from benchmarks.common.steady import Medians, pace, timed_steps
from benchmarks.common.step_log import Part
from photon_ext.observe.cost_model import (
    Periods,
    Prediction,
    Steps,
    Workload,
    predict,
    steps_per_request,
)
from photon_ext.runtime.step import StepKind

TOLERANCE = 0.005  # half a point, or
TOLERANCE_SHARE = 0.1  # of the predicted gain, whichever is more
MOST = 4  # causes named at most,
REST = 0.2  # and no more than leave this share of the difference unexplained
LEAST = 0.0005  # gain that is worth naming
SHOWN_BY = {Cause.ORDINARY_DEVICE: "median time on the device", Cause.ORDINARY_HOST: "median gap"}


def periods(found: Medians, groups: Mapping[int, float]) -> Periods:
    """The model's input from a run's medians; `groups` says how many requests prefill steps have
    (`prefill_groups`).

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
    """One depth: its steady medians, the runs that were observed, and how many sequences ran at
    once.
    """

    depth: int
    calibration: Calibration
    runs: Sequence[Served]
    streams: int

    @property
    def periods(self) -> Periods:
        return periods(self.calibration.usual, prefill_groups(self.work, self.depth))

    @property
    def work(self) -> Workload:
        """What was asked of it, by the observed L."""
        return Workload(self.streams, self.mean_length)

    @property
    def tokens_per_s(self) -> float:
        return sum(run.tokens for run in self.runs) / self.wall_s

    @property
    def wall_s(self) -> float:
        return sum(run.log.wall_s for run in self.runs)

    @property
    def full_tokens_per_s(self) -> float:
        """Tokens/s up to the last step of a full batch; 0 where there was none."""
        tokens, seconds = 0, 0.0
        for run in self.runs:
            timed = run.log.intervals_ms()
            last = max(
                (i for i, (step, _) in enumerate(timed) if step.steady(self.streams)), default=-1
            )
            tokens += sum(step.rows - step.zombies for step, _ in timed[: last + 1])
            seconds += sum(ms for _, ms in timed[: last + 1]) / 1e3
        return tokens / seconds if seconds else 0.0

    @property
    def requests(self) -> int:
        return sum(len(run.lengths) for run in self.runs)

    @property
    def mean_length(self) -> float:
        return sum(run.tokens for run in self.runs) / self.requests

    @property
    def course(self) -> dict[str, Any]:
        """See `course`."""
        return course([run.log for run in self.runs], self.streams)

    @property
    def paces(self) -> Mapping[Cause, Compared]:
        """What shows the parts of ordinary steps, at the contexts of the medians; empty without
        device times.
        """
        usual = self.calibration.usual
        full = [
            each
            for run in self.runs
            for each in timed_steps(run.log)
            if each.step.steady(self.streams)
        ]
        here, there = pace(full, usual), usual.pace
        if here is None or there is None:
            return {}
        return {
            Cause.ORDINARY_DEVICE: Compared(here.device_ms, there.device_ms),
            Cause.ORDINARY_HOST: Compared(here.gap_ms, there.gap_ms),
        }

    def excess(self, work: Workload) -> Tally:
        """Wall time over the model's, by cause; the causes add up."""
        steps, own, tally = steps_per_request(work, self.depth), self.periods, Tally()
        for run in self.runs:
            tally.update(_prefill_steps(run, self.calibration.usual, own, steps))
            tally.update(_other_steps(run, own, steps, work.streams))
            tally.update(self.calibration.uneven(run.log, work.streams))
        return tally


def _prefill_steps(run: Served, usual: Medians, own: Periods, steps: Steps) -> Tally:
    """What prefill steps took over the model: their number and size, and each over the median of
    its size.
    """
    tally, expected = Tally(), 0.0
    prefills = [(step, ms) for step, ms in run.log.intervals_ms() if step.kind is StepKind.PREFILL]
    for step, ms in prefills:
        like = usual.prefill(step.rows) or 0.0
        garbage = step.spent.collected_ms > COLLECTED * abs(ms - like)
        tally.add(Cause.GARBAGE if garbage else Cause.PREFILL, ms - like)
        expected += like
    count = len(run.lengths) * steps.prefill
    tally.add(Cause.PREFILLS, expected - count * own.prefill_ms, len(prefills) - count)
    return tally


def _other_steps(run: Served, own: Periods, steps: Steps, streams: int) -> Tally:
    """What decode steps that are no full ones took over the model, and what the number of full
    ones did.
    """
    times: dict[Cause, list[float]] = {Cause.RAMP: [], Cause.TURNOVER: []}
    steady, ramp_rows = 0, 0
    for step, ms in run.log.counted_ms():
        if step.kind is StepKind.PREFILL:
            continue
        if step.dead:
            times[Cause.TURNOVER].append(ms)
        elif step.steady(streams):
            steady += 1
        else:
            times[Cause.RAMP].append(ms)
            ramp_rows += step.rows - step.zombies
    # as many full steps would have made the ramp's tokens
    count, ramp = len(run.lengths), ramp_rows / streams
    more_decodes = steady + ramp - count * steps.decode
    tally = Tally()
    tally.add(Cause.RAMP, sum(times[Cause.RAMP]) - ramp * own.decode_ms, len(times[Cause.RAMP]))
    tally.add(
        Cause.TURNOVER,
        sum(times[Cause.TURNOVER]) - count * steps.dead * own.dead_ms,
        len(times[Cause.TURNOVER]),
    )
    tally.add(Cause.COUNT, more_decodes * own.decode_ms, more_decodes)
    return tally


class Effect(NamedTuple):
    """What a cause did: to each depth's wall time, and in points of gain (1 is 100 %); the
    medians that show it, where there are some.
    """

    cause: Cause
    block: Excess
    pipe: Excess
    points: float
    block_medians: Compared | None = None
    pipe_medians: Compared | None = None

    def text(self) -> str:
        """With the figures that show it."""
        depths = ((1, self.block, self.block_medians), (2, self.pipe, self.pipe_medians))
        shown = ", ".join(self._depth_text(*given) for given in depths if given[1] != Excess())
        return f"{self.points * 100:+.1f} by {self.cause.value} ({shown})"

    def _depth_text(self, depth: int, found: Excess, medians: Compared | None) -> str:
        beside = "" if medians is None else f" ({SHOWN_BY[self.cause]} {medians.text()})"
        return f"{found.ms:+.1f} ms in {found.steps:.0f} steps at depth {depth}{beside}"

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        found = {
            "cause": self.cause.value,
            "points": self.points,
            "block": self.block._asdict(),
            "pipe": self.pipe._asdict(),
        }
        medians = {"block": self.block_medians, "pipe": self.pipe_medians}
        shown = {
            side: compared._asdict() for side, compared in medians.items() if compared is not None
        }
        return {**found, "medians": {"of": SHOWN_BY[self.cause], **shown}} if shown else found


@dataclass(frozen=True)
class Gain:
    """A prediction held against what was observed.

    Attributes:
        block, pipe: depth 1 and depth 2.
    """

    block: Side
    pipe: Side

    @property
    def work(self) -> Workload:
        """Streams and the observed L; both depths are given the same requests."""
        return self.pipe.work

    @property
    def prediction(self) -> Prediction:
        return predict(self.block.periods, self.pipe.periods, self.work)

    @property
    def observed(self) -> float:
        """Tokens/s at depth 2 over depth 1, minus 1, from wall time."""
        return self.pipe.tokens_per_s / self.block.tokens_per_s - 1

    @property
    def observed_full(self) -> float | None:
        """The same without the ramp-down: up to each depth's last step of a full batch.

        None where there was none.
        """
        block, pipe = self.block.full_tokens_per_s, self.pipe.full_tokens_per_s
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

    def effects(self) -> list[Effect]:
        """What each cause adds to the observed gain; they add up to the whole difference where
        both depths made the same tokens.
        """
        work = self.work
        models = [
            side.requests * steps_per_request(work, side.depth).time_ms(side.periods)
            for side in (self.block, self.pipe)
        ]
        block, pipe = (side.excess(work) for side in (self.block, self.pipe))
        paces = [side.paces for side in (self.block, self.pipe)]
        scale = (1 + self.prediction.gain) / (1 + pipe.total_ms / models[1])
        return [
            Effect(
                cause,
                block.of(cause),
                pipe.of(cause),
                scale * (block.of(cause).ms / models[0] - pipe.of(cause).ms / models[1]),
                *(medians.get(cause) for medians in paces),
            )
            for cause in Cause
            if cause in block.found or cause in pipe.found
        ]

    def explained(self) -> str:
        """The causes of a difference, the largest first, in points of gain, until they make up
        most of it.
        """
        off = self.observed - self.prediction.gain
        named, left = [], abs(off)
        for effect in sorted(
            self.effects(), key=lambda each: -each.points * (1 if off > 0 else -1)
        ):
            if left <= REST * abs(off) or effect.points * off <= 0 or abs(effect.points) < LEAST:
                break
            named.append(effect.text())
            left -= abs(effect.points)
        full = (
            ""
            if self.observed_full is None
            else f" ({self.observed_full:+.1%} while the batch was full)"
        )
        return f"{off * 100:+.1f} points off{full}: " + (
            "; ".join(named[:MOST]) or "no single cause"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        found = self.prediction
        return {
            "block_ms": found.block_ms,
            "pipe_ms": found.pipe_ms,
            "periods": {"block": vars(self.block.periods), "pipe": vars(self.pipe.periods)},
            "medians": {
                "block": _medians_dict(self.block.calibration.usual),
                "pipe": _medians_dict(self.pipe.calibration.usual),
            },
            "course": {"block": self.block.course, "pipe": self.pipe.course},
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
            "effects": {effect.cause.name.lower(): effect.as_dict() for effect in self.effects()},
            "tokens_per_s": {"block": self.block.tokens_per_s, "pipe": self.pipe.tokens_per_s},
            "wall_s": {"block": self.block.wall_s, "pipe": self.pipe.wall_s},
            "tokens_equal": self.tokens_equal,
        }


def _medians_dict(usual: Medians) -> dict[str, Any]:
    return {
        **usual._asdict(),
        "pace": None if usual.pace is None else usual.pace._asdict(),
        "sorts": {beside.name.lower(): sort._asdict() for beside, sort in usual.sorts.items()},
        "parts": {part.name.lower(): ms for part, ms in zip(Part, usual.parts, strict=True)},
    }
