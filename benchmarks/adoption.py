"""README's adoption example against the stock loop it replaces: the same tokens, and ms per step before and after.

    python -m benchmarks.adoption --device cuda --model qwen3-0.6b --dtype float32 --json benchmarks/results/adoption.json

ms per step is the time that further tokens take: (time of the long run - time of the short run) / (difference in tokens), so that
start-up and capture, which happen once, stay out of it. They are reported beside it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks import stock_loop
from benchmarks.common.env import REPOSITORY
from benchmarks.common.options import DTYPES, device_of, integers, parser
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.table import print_table

Decode = Callable[[Any, Sequence[int], int, Sequence[int]], list[int]]
BLOCK = re.compile(r"<!-- adoption:.*?-->\n```python\n(.*?)```", re.DOTALL)


def readme_block() -> str:
    """The source of README's example."""
    found = BLOCK.search((REPOSITORY / "README.md").read_text())
    if found is None:
        raise BenchmarkError("README.md has no adoption block: a ```python block after the comment <!-- adoption: ... -->")
    return found.group(1)


def readme_decode() -> Decode:
    """``decode`` as README defines it."""
    namespace: dict[str, Any] = {}
    exec(compile(readme_block(), "README.md", "exec"), namespace)
    return namespace["decode"]


def build_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers model of random weights; "tiny" or "qwen3-0.6b"."""
    torch.manual_seed(0)
    with torch.device(device):
        if name == "tiny":
            sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
            model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16))
        elif name == "qwen3-0.6b":
            sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True))
        else:
            raise BenchmarkError(f"--model {name!r} is unknown; use tiny or qwen3-0.6b")
    return model.to(dtype).eval()


def measure(model: Any, prompt: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Times both loops on equal work; raises BenchmarkError when their tokens differ."""
    short, long = lengths
    adopted = readme_decode()
    loops: dict[str, Decode] = {"before": stock_loop.decode, "after": adopted}
    tokens = {name: loop(model, prompt, long, ()) for name, loop in loops.items()}
    if tokens["before"] != tokens["after"]:
        first = next(i for i, pair in enumerate(zip(tokens["before"], tokens["after"], strict=True)) if pair[0] != pair[1])
        raise BenchmarkError(f"tokens differ from index {first} on: {tokens['before'][first:][:8]} against {tokens['after'][first:][:8]}")
    times = {name: (seconds(loop, model, prompt, short), seconds(loop, model, prompt, long)) for name, loop in loops.items()}
    per_step = {name: 1e3 * (slow - fast) / (long - short) for name, (fast, slow) in times.items()}
    return {
        "tokens_equal": long,
        "ms_per_step_before": per_step["before"],
        "ms_per_step_after": per_step["after"],
        "ratio": per_step["before"] / per_step["after"],
        "total_s_before": times["before"][1],
        "total_s_after": times["after"][1],
        "lines": len([line for line in readme_block().splitlines() if line.strip()]),
    }


def seconds(loop: Decode, model: Any, prompt: Sequence[int], tokens: int) -> float:
    """Wall time of one run, the better of two."""
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        loop(model, prompt, tokens, ())
        best = min(best, time.perf_counter() - start)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="tiny", help="tiny or qwen3-0.6b (random weights)")
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    options.add_argument("--prompt", type=int, default=16, help="prompt tokens")
    options.add_argument("--tokens", type=integers, default=[16, 80], metavar="SHORT,LONG", help="new tokens of the two timed runs")
    args = options.parse_args(arguments)
    device = device_of(args.device)
    result = ResultFile("adoption", args, args.json)
    print(f"{args.model} (random weights), {args.dtype}, {device}, {'one graph per step' if device.type == 'cuda' else 'eager steps'}")
    model = build_model(args.model, DTYPES[args.dtype], device)
    prompt = [(7 * i + 3) % 250 for i in range(args.prompt)]
    entry = result.measure({"model": args.model, "dtype": args.dtype}, lambda: measure(model, prompt, args.tokens))
    if entry is None:
        return 1
    print_table(
        ("loop", "ms/step", "whole run s"),
        [(name, entry[f"ms_per_step_{name}"], entry[f"total_s_{name}"]) for name in ("before", "after")],
    )
    print(f"{entry['tokens_equal']} tokens equal; {entry['lines']} lines of README's code; x{entry['ratio']:.2f}")
    if device.type == "cpu":
        print("On the CPU torch code runs eagerly and there is no idle gap to remove: about even is what to expect. The gain is on a GPU.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
