"""What pipelining is worth, predicted from measured periods.

A blocking loop runs forward, sampling and bookkeeping one after the other; a pipelined one hides
the bookkeeping of one step under the next step's forward. Moondream's post "Photon: pipelined
decoding" writes that as

    speedup = T_block / T_pipe x (1 - z)

with z, the zombie tax: one forward per L tokens at one stream, nearly nothing in a batch
(`Prediction.formula_gain`). `Prediction.gain` counts as this engine's loop does:

- The device sees the stop token itself. At one stream the wasted step reads no weights, and costs
  `Periods.dead_ms`, not a forward.
- A zombie holds its row until its step is committed: while more requests wait, its successor starts
  up to two steps later than at depth 1.
- Prefill steps take their share of the time. Requests that begin together share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from photon_ext.checks import check_count, check_depth
from photon_ext.errors import ConfigError

PAYS = 0.05  # gain from which pipelining pays
HARDLY = 0.02  # gain below which it hardly does


@dataclass(frozen=True)
class Periods:
    """Steady periods of one loop: from one commit to the next, by what was committed, in ms.

    Attributes:
        decode_ms: a decode step.
        prefill_ms: a prefill step, on average.
        dead_ms: a step of nothing but zombies; 0 at depth 1, where there is none.

    Raises:
        ConfigError: decode_ms is not above 0, or another is negative or not finite.
    """

    decode_ms: float
    prefill_ms: float
    dead_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, ms in vars(self).items():
            if not (math.isfinite(ms) and (ms > 0 or (ms == 0 and name != "decode_ms"))):
                wanted = "a positive number" if name == "decode_ms" else "a number from 0 on"
                raise ConfigError(f"{name} is {ms!r}; give {wanted}")


@dataclass(frozen=True)
class Workload:
    """What is asked of the engine, without an end: more requests wait than run.

    Attributes:
        streams: sequences that run at once.
        tokens_per_request: L, tokens a request generates before its stop token ends it, the stop
            token included; about geometric.
        prompt_steps: of answers that are all of L tokens, and end by their length cap: prefill
            steps that one prompt fills, 0.5 where two share one. None: they end by a stop token.

    Raises:
        ConfigError: there is no stream, or a number is too small or not finite.
    """

    streams: int
    tokens_per_request: float
    prompt_steps: float | None = None

    def __post_init__(self) -> None:
        check_count("streams", self.streams)
        length = self.tokens_per_request
        if not (math.isfinite(length) and length >= 1):
            raise ConfigError(f"tokens_per_request is {length!r}; give a number from 1 on")
        steps = self.prompt_steps
        if steps is not None and not (math.isfinite(steps) and steps > 0):
            raise ConfigError(f"prompt_steps is {steps!r}; give a positive number, or None")


@dataclass(frozen=True)
class Steps:
    """Steps of a loop per request; its share of a step where several requests are in it.

    Attributes:
        decode, prefill, dead: steps per request, by kind.
        lost_rows: row-steps per request in which its row waited or was a zombie, in a batch.
    """

    decode: float
    prefill: float
    dead: float
    lost_rows: float

    def time_ms(self, periods: Periods) -> float:
        """Milliseconds per request."""
        decode, prefill = self.decode * periods.decode_ms, self.prefill * periods.prefill_ms
        return decode + prefill + self.dead * periods.dead_ms


def steps_per_request(work: Workload, depth: int) -> Steps:
    """How many steps a request costs at a depth (1 or 2, else a ConfigError).

    A request takes one prefill step, which samples its first token, and L - 1 decode steps. In a
    batch, requests that end in the same step are admitted in the same prefill step, and one is due
    after each decode step in which any of the streams ended.

    A cap is known ahead, and makes no zombie. Where answers end so, a prompt waits nearly always,
    and each prefill step is followed by a decode step; short answers need no others.
    """
    check_depth(depth)
    length, streams = work.tokens_per_request, work.streams
    if work.prompt_steps is not None:
        prefill = max(work.prompt_steps, 1 / streams)
        if streams == 1:
            return Steps(length - 1, float(math.ceil(prefill)), 0.0, 0.0)
        turns = prefill if length > 1 else 0.0
        return Steps(max((length - 1) / streams, turns), prefill, 0.0, 0.0)
    if streams == 1:
        return Steps(length - 1, 1.0, float(depth == 2), 0.0)
    if length == 1:
        return Steps(0.0, 1 / streams, 0.0, 0.0)
    due, lost = _chance_of_an_end(length, streams), 0.0
    for _ in range(8 if depth == 2 else 0):  # rows lost to zombies end nobody's sequence
        busy = streams * (length - 1) / (length - 1 + lost)
        due, lost = _pipelined(_chance_of_an_end(length, busy))
    decode = (length - 1 + lost) / streams
    return Steps(decode, min(1.0, max(due * decode, 1 / streams)), 0.0, lost)


def _chance_of_an_end(length: float, rows: float) -> float:
    """The chance that a decode step of `rows` ends a sequence, for lengths without memory."""
    return min(-math.expm1(rows * math.log1p(-1 / length)), 1 - 1e-9)


def _pipelined(ends: float) -> tuple[float, float]:
    """Prefill steps per decode step, and row-steps lost per request, at depth 2, where a decode
    step ends a sequence with chance `ends`.

    A time without ends closes like this: the step that ends a sequence, two more (the first has
    the zombie), and then its successor's prefill. Who ends in those two is in the next prefill,
    one decode step on; from there, prefill and decode take turns for as long as each decode step
    ends somebody. Whoever ends right before a prefill leaves no zombie.
    """
    more = (1 - (1 - ends) ** 2) / (1 - ends)  # prefills after the first, until nobody ends
    decode = 1 / ends + 2 + more
    return (1 + more) / decode, (2 * (1 / ends + 1) + 1 + more) / decode


@dataclass(frozen=True)
class Prediction:
    """What pipelining is worth.

    Attributes:
        block_ms, pipe_ms: T_block and T_pipe, the decode periods.
        formula_gain: T_block / T_pipe x (1 - z) - 1 with z of the published formula.
        gain: tokens/s at depth 2 over depth 1, minus 1, with prefill steps and our zombies.
        zombie_share: share of the pipelined loop's time that zombies cost.
    """

    block_ms: float
    pipe_ms: float
    formula_gain: float
    gain: float
    zombie_share: float

    @property
    def verdict(self) -> str:
        """Whether it pays, in a sentence."""
        hidden = f"{max(self.block_ms - self.pipe_ms, 0.0):.2f} ms of a step of"
        figures = f"({self.gain:+.1%}: {hidden} {self.block_ms:.2f} ms are hidden)"
        if self.gain >= HARDLY:
            return f"pipelining pays{' a little' * (self.gain < PAYS)} {figures}"
        if self.gain < 0:
            return (
                f"pipelining does not pay {figures}: zombies cost {self.zombie_share:.1%}; a "
                "blocking loop is as good here, and simpler"
            )
        return (
            f"pipelining hardly pays {figures}; of a step of {self.pipe_ms:.1f} ms the device "
            "needs nearly all, and faster kernels, fewer bytes or a larger batch give more"
        )


def predict(block: Periods, pipe: Periods, work: Workload) -> Prediction:
    """What depth 2 is worth over depth 1, from the measured periods of both."""
    blocking, pipelined = steps_per_request(work, 1), steps_per_request(work, 2)
    block_ms, pipe_ms = blocking.time_ms(block), pipelined.time_ms(pipe)
    has_zombies = work.streams == 1 and work.prompt_steps is None
    published_z = 1 / work.tokens_per_request if has_zombies else 0.0
    return Prediction(
        block_ms=block.decode_ms,
        pipe_ms=pipe.decode_ms,
        formula_gain=block.decode_ms / pipe.decode_ms * (1 - published_z) - 1,
        gain=block_ms / pipe_ms - 1,
        zombie_share=(pipe_ms - blocking.time_ms(pipe)) / pipe_ms,
    )
