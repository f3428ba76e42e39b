"""Decode on a CPU: one stream beside transformers and llama.cpp, and many requests at once.

    python -m benchmarks.cpu [--model smollm2] [--new-tokens 64] [--threads N] [--json FILE]

All are greedy. Ours and transformers.generate run the same float32 weights, and their tokens must
be equal before anything is timed. llama.cpp reads the model's own .gguf file, weights as stored,
where the package llama-cpp-python is installed. Runs alternate; medians are compared.

With `--together` 8 requests of mixed lengths go through the engine, at once and one after the other
in turns, in both dtypes; their tokens must be equal.
"""

from __future__ import annotations

import importlib.util
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch

import photon_ext
from benchmarks.common import options as cli
from benchmarks.common.checkpoint import transformers_model
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.session import Session
from benchmarks.common.tables import Table
from photon_ext import Engine, SamplingParams
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.loader import load_model, resolve_model
from photon_ext.models.weights import DecoderWeights

PROMPT = "The first thing that a traveller sees on coming over the pass is the lake, and behind it"
SPARE = 8
MOST_THREADS = 256  # of our kernels (csrc/cpu/parallel.cpp)
BASE = "transformers float32"
TOGETHER = ((16, 56), (40, 48), (64, 40), (24, 64), (120, 32), (200, 48), (8, 96), (30, 72))
"""Tokens of prompts and answers, of requests at once."""
HEADER = ("", "tokens/s", "ratio", "decode tokens/s", "ratio", "first token ms")


class Run(NamedTuple):
    """New token ids, seconds until the first, and seconds from the first to the last."""

    tokens: list[int]
    first_s: float
    rest_s: float


Side = Callable[[], Run]


def run_ours(config: ModelConfig, weights: DecoderWeights, prompt: list[int], count: int) -> Run:
    """One row through the pipeline, at depth 2."""
    with Session(config, weights, [prompt], count + SPARE, depth=2) as session:
        tokens = session.tokens[session.rows[0].index]
        begin = time.perf_counter()
        session.begin()
        first, had = time.perf_counter(), len(tokens)
        while len(tokens) < count:
            session.step()
        end = time.perf_counter()
        session.check()
    decode = (end - first) * (count - 1) / max(1, count - had)
    return Run(tokens[:count], first - begin, decode)


def run_transformers(model: Any, prompt: list[int], count: int) -> Run:
    """`generate` without a limit but the number of tokens; a run of its own times the first."""
    ids = torch.tensor([prompt])

    def generate(tokens: int) -> tuple[list[int], float]:
        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - begin

    first_ids, first = generate(1)
    found, total = generate(count)
    if found[:1] != first_ids:
        raise BenchmarkError("transformers.generate is not deterministic here")
    return Run(found, first, total - first)


def run_llama_cpp(llama: Any, prompt: list[int], count: int) -> Run:
    """`Llama.generate` of llama-cpp-python, greedy and from an empty cache."""
    llama.reset()
    begin = time.perf_counter()
    stream = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
    tokens = [next(stream)]
    first = time.perf_counter()
    while len(tokens) < count:
        tokens.append(next(stream))
    return Run(tokens, first - begin, time.perf_counter() - first)


def open_llama_cpp(name: str, length: int, threads: int) -> tuple[Any, str]:
    """llama.cpp with the model's .gguf file, and ""; None, and why not, where it cannot run."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None, "not installed: pip install llama-cpp-python"
    if name in SHAPES or resolve_model(name).suffix != ".gguf":
        return None, f"needs a .gguf file, which {name} is not"
    import llama_cpp

    path, sizes = str(resolve_model(name)), {"n_ctx": length, "n_batch": length}
    both = {"n_threads": threads, "n_threads_batch": threads}
    return llama_cpp.Llama(path, **sizes, **both, n_gpu_layers=0, verbose=False), ""


def reference_model(name: str, config: ModelConfig, weights: DecoderWeights) -> Any:
    """transformers' model in float32: by its own loader for a directory, else around our weights,
    which it shares."""
    if name not in SHAPES and resolve_model(name).is_dir():
        import transformers

        path = Path(name).expanduser()
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
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


def rates(runs: list[Run], new_tokens: int) -> dict[str, float]:
    """Medians: tokens/s from prompt to end, tokens/s after the first token, ms to the first."""
    return {
        "tokens_per_s": new_tokens / median(run.first_s + run.rest_s for run in runs),
        "decode_tokens_per_s": (new_tokens - 1) / median(run.rest_s for run in runs),
        "ttft_ms": median(run.first_s for run in runs) * 1e3,
    }


def compare(args: Namespace, result: ResultFile) -> dict[str, Any]:
    """Everything, in one run."""
    count, cpu = args.new_tokens, torch.device("cpu")
    config, exact = open_model(args.model, torch.float32, cpu)
    prompt = encode(args.model, args.prompt, config.vocab)
    sides: dict[str, Side] = {"float32": partial(run_ours, config, exact, prompt, count)}
    expected = sides["float32"]().tokens
    reference = reference_model(args.model, config, exact)
    theirs = partial(run_transformers, reference, prompt, count)
    check_equal(expected, theirs().tokens)
    default = open_model(args.model, None, cpu)[1]
    default_name = str(default.dtype).removeprefix("torch.")
    if default.dtype != torch.float32:
        sides[default_name] = partial(run_ours, config, default, prompt, count)
    sides[BASE] = theirs
    llama, absent = open_llama_cpp(args.model, len(prompt) + count + SPARE, args.threads)
    if llama is not None:
        sides["llama.cpp"] = partial(run_llama_cpp, llama, prompt, count)
    for side in sides.values():
        side()
    runs: dict[str, list[Run]] = {label: [] for label in sides}
    for round_ in range(args.repeats):
        for label, side in sides.items():
            result.progress.show(f"cpu: {label}, run {round_ + 1} of {args.repeats}")
            runs[label].append(side())
    if any(run.tokens != expected for run in runs["float32"]):
        raise BenchmarkError("our float32 tokens differ from run to run")
    measured = {label: rates(own, count) for label, own in runs.items()}
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": count,
        "threads": torch.get_num_threads(),
        "tokens_equal": True,
        "default_dtype": default_name,
        "rates": measured,
        "ratio": _ratios(measured, "tokens_per_s"),
        "decode_ratio": _ratios(measured, "decode_tokens_per_s"),
        "llama_cpp": absent or "as stored in the file",
    }


def together(args: Namespace, dtype: torch.dtype | None, result: ResultFile) -> dict[str, Any]:
    """Requests at once against the same one after the other, in turns."""
    config, weights = open_model(args.model, dtype, torch.device("cpu"))
    choose = Random(7)
    prompts = [[choose.randrange(config.vocab) for _ in range(size)] for size, _ in TOGETHER]
    params = [SamplingParams(max_new_tokens=size, ignore_eos=True) for _, size in TOGETHER]
    longest = max(map(sum, TOGETHER))
    options = {"max_rows": len(TOGETHER), "max_len": longest, "prefix_cache": False}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with Engine.from_weights(config, weights, None, **options) as engine:
        engine.generate(prompts, params)
        for round_ in range(args.repeats):
            for at_once in (False, True):
                result.progress.show(f"cpu: {weights.dtype}, at once {at_once}, run {round_ + 1}")
                begin = time.perf_counter()
                if at_once:
                    outputs = engine.generate(prompts, params)
                else:
                    pairs = zip(prompts, params, strict=True)
                    alone = [engine.generate([prompt], one)[0] for prompt, one in pairs]
                seconds[at_once].append(time.perf_counter() - begin)
    if [one.token_ids for one in outputs] != [one.token_ids for one in alone]:
        raise BenchmarkError("tokens of requests at once are not those of the same alone")
    tokens = sum(count for _, count in TOGETHER)
    rate, single = (tokens / median(seconds[at_once]) for at_once in (True, False))
    return {
        "requests": len(TOGETHER),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "tokens_equal": True,
        "tokens_per_s": rate,
        "one_by_one_tokens_per_s": single,
        "ratio": rate / single,
        "seconds": {"at_once": seconds[True], "one_by_one": seconds[False]},
    }


def check_equal(ours: list[int], theirs: list[int]) -> None:
    """Raises BenchmarkError at the first token that differs."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise BenchmarkError(f"token {at} is {a}, transformers says {b}")


def _ratios(measured: dict[str, dict[str, float]], field: str) -> dict[str, float]:
    return {label: own[field] / measured[BASE][field] for label, own in measured.items()}


def prompt_text(text: str) -> str:
    """A prompt of one token at least."""
    if not text:
        raise ArgumentTypeError("it is empty; give some text")
    return text


def thread_count(text: str) -> int:
    """Threads that all sides can have; torch crashes where the system has no more of them."""
    threads = cli.positive_integer(text)
    if threads > MOST_THREADS:
        told = f"{text!r} is above {MOST_THREADS}, the most that our kernels take"
        raise ArgumentTypeError(told)
    return threads


def single_stream(args: Namespace, result: ResultFile) -> bool:
    """Measures and prints it; False: it failed."""
    labels = {"what": "single stream", "model": args.model, "device": "cpu"}
    entry = result.measure(labels, partial(compare, args, result))
    if entry is None:
        return False
    rows = []
    for label, own in entry["rates"].items():
        whole, decode = entry["ratio"][label], entry["decode_ratio"][label]
        rates_ = own["tokens_per_s"], whole, own["decode_tokens_per_s"], decode
        rows.append([label, *rates_, own["ttft_ms"]])
    sizes = f"{entry['new_tokens']} new tokens after {entry['prompt_tokens']}"
    print(f"{args.model}: {sizes}, {entry['threads']} threads, float32 tokens equal")
    Table("", HEADER, rows).show()
    print(f"llama.cpp: {entry['llama_cpp']}")
    return True


def requests_together(args: Namespace, result: ResultFile) -> bool:
    """The same for requests at once, in float32 and in the model's own dtype."""
    ok = True
    for name, dtype in (("float32", torch.float32), ("default", None)):
        labels = {"what": "together", "model": args.model, "device": "cpu", "of": name}
        entry = result.measure(labels, partial(together, args, dtype, result))
        if entry is not None:
            rates_ = f"{entry['tokens_per_s']:.1f} and {entry['one_by_one_tokens_per_s']:.1f}"
            told = f"{entry['requests']} requests at once and one by one {rates_} tokens/s"
            print(f"{entry['dtype']}: {told}, x{entry['ratio']:.2f}, tokens equal")
        ok = ok and entry is not None
    return ok


def main(given: list[str] | None = None) -> int:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    known = ", ".join(SHAPES)
    add("--model", default="smollm2", help=f"a real model, or one of {known}: random weights")
    add("--prompt", type=prompt_text, default=PROMPT)
    add("--new-tokens", type=cli.positive_integer, default=64)
    add("--repeats", type=cli.positive_integer, default=3)
    add("--threads", type=thread_count, help="for all; default: as many as our kernels take")
    add("--together", action="store_true", help="only requests at once and one after the other")
    args = options.parse_args(given)
    args.threads = args.threads or photon_ext.num_threads()
    photon_ext.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    result = ResultFile("cpu", args, args.json)
    show = requests_together if args.together else single_stream
    return 0 if show(args, result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
