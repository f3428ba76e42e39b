"""Single-stream decode on a CPU against transformers.generate in float32: same weights, prompt,
threads and number of new tokens, greedy.

    python -m benchmarks.cpu [--model smollm2] [--new-tokens 64] [--threads N] [--json FILE]

Tokens in float32 must be equal before anything is timed. Runs alternate; medians are compared. Peak
memory is the process's, so ours is read before transformers is imported.
"""

from __future__ import annotations

import resource
import statistics
import time
from argparse import ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import photon_ext
from benchmarks.common.checkpoint import transformers_model
from benchmarks.common.options import parser, positive_integer
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.session import Session
from benchmarks.common.shapes import SHAPES, open_model
from benchmarks.common.table import print_table
from photon_ext.models.config import ModelConfig
from photon_ext.models.loader import load_model, resolve_model
from photon_ext.models.weights import DecoderWeights

PROMPT = "The first thing that a traveller sees on coming over the pass is the lake, and behind it"
SPARE = 8
MOST_THREADS = 256  # of our kernels (csrc/cpu/parallel.cpp)


def peak_mib() -> float:
    """Peak resident memory of the process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Ours:
    """One row through the pipeline, at depth 2."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, prompt: list[int], new_tokens: int
    ) -> None:
        self._config, self._weights, self._prompt, self._new_tokens = (
            config,
            weights,
            prompt,
            new_tokens,
        )

    def run(self) -> tuple[list[int], float, float]:
        """Token ids, seconds until the first, and seconds from the first to the last."""
        with Session(
            self._config, self._weights, [self._prompt], self._new_tokens + SPARE, depth=2
        ) as session:
            tokens = session.tokens[session.rows[0].index]
            begin = time.perf_counter()
            session.prefill()
            first, had = time.perf_counter(), len(tokens)
            while len(tokens) < self._new_tokens:
                session.step()
            end = time.perf_counter()
            session.check()
        decode = (end - first) * (self._new_tokens - 1) / max(1, self._new_tokens - had)
        return tokens[: self._new_tokens], first - begin, decode


class Transformers:
    """`generate` of transformers in float32, without a limit but the number of tokens."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: DecoderWeights,
        prompt: list[int],
        new_tokens: int,
    ) -> None:
        self._model = reference_model(name, config, weights)
        self._prompt, self._new_tokens = torch.tensor([prompt]), new_tokens

    def run(self) -> tuple[list[int], float, float]:
        """As Ours.run; the first token is timed by a run of its own."""
        first_ids, first = self._generate(1)
        ids, total = self._generate(self._new_tokens)
        if ids[:1] != first_ids:
            raise BenchmarkError("transformers.generate is not deterministic here")
        return ids, first, total - first

    def _generate(self, tokens: int) -> tuple[list[int], float]:
        begin = time.perf_counter()
        out = self._model.generate(
            self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - begin
        return out[0, self._prompt.shape[1] :].tolist(), seconds


def reference_model(name: str, config: ModelConfig, weights: DecoderWeights) -> Any:
    """transformers' model in float32: from its own loader for a directory, else around our
    float32 weights, which it shares.
    """
    if name not in SHAPES and resolve_model(name).is_dir():
        import transformers

        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            Path(name).expanduser(), dtype=torch.float32
        )
        return loaded.eval()
    return transformers_model(config, weights)


def encode(name: str, prompt: str, vocab: int) -> list[int]:
    """The prompt's ids; for random weights, ids below `vocab`."""
    if name in SHAPES:
        return [ord(letter) % vocab for letter in prompt]
    tokenizer = load_model(name).tokenizer
    if tokenizer is None:
        raise BenchmarkError(f"{name} has no tokenizer; use a model that does")
    return tokenizer.encode(prompt)


def rates(runs: list[tuple[list[int], float, float]], new_tokens: int) -> dict[str, float]:
    """Medians over runs: tokens/s from prompt to end, tokens/s after the first token, ms to the
    first.
    """
    return {
        "tokens_per_s": new_tokens / statistics.median(first + rest for _, first, rest in runs),
        "decode_tokens_per_s": (new_tokens - 1) / statistics.median(rest for _, _, rest in runs),
        "ttft_ms": statistics.median(first for _, first, _ in runs) * 1e3,
    }


def compare(args: Namespace) -> dict[str, Any]:
    """Everything, in one run."""
    count = args.new_tokens
    config, exact = open_model(args.model, torch.float32, torch.device("cpu"))
    prompt = encode(args.model, args.prompt, config.vocab)
    ours = {"float32": Ours(config, exact, prompt, count)}
    ours_tokens = ours["float32"].run()[0]
    peaks = {"ours float32": peak_mib()}
    theirs = Transformers(args.model, config, exact, prompt, count)
    their_tokens = theirs.run()[0]
    peaks["with transformers"] = peak_mib()
    if ours_tokens != their_tokens:
        at = next(
            i for i, (a, b) in enumerate(zip(ours_tokens, their_tokens, strict=True)) if a != b
        )
        raise BenchmarkError(
            f"token {at} is {ours_tokens[at]}, transformers says {their_tokens[at]}"
        )
    default = open_model(args.model, None, torch.device("cpu"))[1]
    default_name = str(default.dtype).removeprefix("torch.")
    if default.dtype != torch.float32:
        ours[default_name] = Ours(config, default, prompt, count)
        ours[default_name].run()
    sides: dict[str, Ours | Transformers] = {**ours, "transformers float32": theirs}
    runs: dict[str, list[tuple[list[int], float, float]]] = {}
    for _ in range(args.repeats):
        for label, side in sides.items():
            runs.setdefault(label, []).append(side.run())
    if any(run[0] != ours_tokens for run in runs["float32"]):
        raise BenchmarkError("our float32 tokens differ from run to run")
    measured = {label: rates(own, count) for label, own in runs.items()}
    base = measured["transformers float32"]
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": count,
        "threads": torch.get_num_threads(),
        "tokens_equal": True,
        "default_dtype": default_name,
        "rates": measured,
        "ratio": {
            label: own["tokens_per_s"] / base["tokens_per_s"] for label, own in measured.items()
        },
        "decode_ratio": {
            label: own["decode_tokens_per_s"] / base["decode_tokens_per_s"]
            for label, own in measured.items()
        },
        "peak_mib": peaks,
    }


def prompt_text(text: str) -> str:
    """A prompt of one token at least."""
    if not text:
        raise ArgumentTypeError("it is empty; give some text")
    return text


def thread_count(text: str) -> int:
    """Threads that both sides can have: torch crashes where the system has no more of them, and
    our kernels take no more than these.
    """
    threads = positive_integer(text)
    if threads > MOST_THREADS:
        raise ArgumentTypeError(f"{text!r} is above {MOST_THREADS}, the most that our kernels take")
    return threads


def main(given: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--model",
        default="smollm2",
        help=f"a real model, or one of {', '.join(SHAPES)} with random weights",
    )
    options.add_argument("--prompt", type=prompt_text, default=PROMPT)
    options.add_argument("--new-tokens", type=positive_integer, default=64)
    options.add_argument("--repeats", type=positive_integer, default=3)
    options.add_argument(
        "--threads", type=thread_count, help="for both sides; default: as many as our kernels take"
    )
    args = options.parse_args(given)
    args.threads = args.threads or photon_ext.num_threads()
    photon_ext.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    result = ResultFile("cpu", args, args.json)
    entry = result.measure(
        {"what": "single stream", "model": args.model, "device": "cpu"}, partial(compare, args)
    )
    if entry is None:
        return 1
    rows = [
        [
            label,
            own["tokens_per_s"],
            entry["ratio"][label],
            own["decode_tokens_per_s"],
            entry["decode_ratio"][label],
            own["ttft_ms"],
        ]
        for label, own in entry["rates"].items()
    ]
    print(
        f"{args.model}: {entry['new_tokens']} new tokens after {entry['prompt_tokens']}, "
        f"{entry['threads']} threads, tokens equal"
    )
    print_table(("", "tokens/s", "ratio", "decode tokens/s", "ratio", "first token ms"), rows)
    print(
        "peak memory: "
        + ", ".join(f"{label} {mib:.0f} MiB" for label, mib in entry["peak_mib"].items())
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
