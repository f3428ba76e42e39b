"""What adapters (LoRA) cost a step, by how many different ones the rows have, in turns.

    python -m benchmarks.adapters [--model qwen3-4b] [--rows 32] [--adapters 1,8,32] [--json FILE]

Adapters have random weights and adapt all linears of a layer. Measured are an engine without slots
(`no slots`), and one with as many slots as adapters: no row has an adapter (`none`), or all have
one, of so many different ones (`1`, `8`, `32`). Ratios are to the engine without slots.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import options as cli
from benchmarks.common import turns
from benchmarks.common.turns import Ask, Decoding, in_turns, sizes
from photon_ext import Engine, SamplingParams

ON_GPU = {"model": ["qwen3-4b"], "rows": [32], "adapters": [1, 8, 32], "steps": 200, "rounds": 3}
ON_CPU = {"model": ["small"], "rows": [4], "adapters": [1, 4], "steps": 40, "rounds": 3}
DEVIATION = 0.01  # of an adapter's weights


def load_adapters(engine: Engine, count: int) -> None:
    """So many, which share one copy on the host; each has a slot of its own."""
    store: Any = engine._adapters._store
    like = store._memory
    weights = torch.randn(store.shape.words) * DEVIATION
    weights = weights.to(like.dtype)
    weights = weights.pin_memory() if like.is_cuda else weights
    with patch.object(store, "read", lambda _: weights):
        for number in range(count):
            engine.load_lora(str(number), "")


def asks_of(adapters: int, rows: int, steps: int) -> list[Ask]:
    """Of each row; 0 adapters: none."""
    params = SamplingParams(max_new_tokens=steps, ignore_eos=True)
    return [Ask(params, {"lora": str(i % adapters)} if adapters else {}) for i in range(rows)]


def measure(model: str, rows: int, args: Namespace) -> dict[str, Any]:
    """The figures of all modes, which take turns."""
    config, weights = turns.open_weights(model, args)
    slots = {"lora_slots": max(args.adapters), "lora_rank": args.rank}
    shared = sizes(rows, args.steps)
    with (
        Engine.from_weights(config, weights, **shared) as plain,
        Engine.from_weights(config, weights, **shared, **slots) as adapted,
    ):
        load_adapters(adapted, max(args.adapters))
        without, with_slots = (Decoding(one, rows, args.steps) for one in (plain, adapted))
        modes = {"no slots": partial(without.run, asks_of(0, rows, args.steps))}
        for count in (0, *args.adapters):
            asks = asks_of(count, rows, args.steps)
            modes[str(count or "none")] = partial(with_slots.run, asks)
        return {"modes": in_turns(modes, args.rounds)}


def main(given: list[str] | None = None) -> int:
    options = turns.parser(__doc__.splitlines()[0])
    options.add_argument(
        "--adapters", type=cli.integers, help="how many different ones the rows have"
    )
    options.add_argument("--rank", type=cli.positive_integer, default=16)
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    turns.check_steps(options, args)
    return turns.measure_all("adapters", args, measure)


if __name__ == "__main__":
    sys.exit(main())
