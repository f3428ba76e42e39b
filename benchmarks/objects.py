"""What rows whose answers are objects (points, boxes, outlines) cost a step beside text, in turns.

    python -m benchmarks.objects [--model qwen3-0.6b] [--rows 32] [--json FILE]

The model has region heads of random weights, of 1,024 bins. Measured are rows of text alone
(`text`), every other row an object's (`half`), and all rows (`objects`); the skills take turns.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from itertools import cycle
from typing import Any

from benchmarks.common import options as cli
from benchmarks.common import turns
from benchmarks.common.turns import Ask, Decoding, in_turns, sizes
from photon_ext import Engine, SamplingParams
from photon_ext.models.region import RegionConfig, RegionHeads
from photon_ext.sampling.spatial import SKILLS

MODES = {"text": 0, "half": 2, "objects": 1}  # every so many-th row has objects
ON_GPU = {"model": ["qwen3-0.6b"], "rows": [32], "steps": 400, "rounds": 5}
ON_CPU = {"model": ["small"], "rows": [4], "steps": 40, "rounds": 3}


def asks_of(every: int, rows: int, steps: int) -> list[Ask]:
    """Of each row; the last of so many has objects, with as many values as text has tokens, or some
    more."""
    text = Ask(SamplingParams(max_new_tokens=steps, ignore_eos=True))
    skills = cycle(
        {"skill": skill, "max_objects": -(-steps // values)} for skill, values in SKILLS.items()
    )
    return [
        text._replace(options=next(skills)) if every and row % every == every - 1 else text
        for row in range(rows)
    ]


def measure(model: str, rows: int, args: Namespace) -> dict[str, Any]:
    """The figures of all modes, which take turns."""
    config, weights = turns.open_weights(model, args)
    heads = RegionHeads(RegionConfig(config.hidden), weights.dtype, weights.device)
    with Engine.from_weights(config, weights, region=heads, **sizes(rows, args.steps)) as engine:
        decoding = Decoding(engine, rows, args.steps)
        modes = {
            mode: partial(decoding.run, asks_of(every, rows, args.steps))
            for mode, every in MODES.items()
        }
        return {"modes": in_turns(modes, args.rounds)}


def main(given: list[str] | None = None) -> int:
    options = turns.parser(__doc__.splitlines()[0])
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    turns.check_steps(options, args)
    return turns.measure_all("objects", args, measure)


if __name__ == "__main__":
    sys.exit(main())
