"""Decode on a CPU: one stream beside transformers and llama.cpp, and many requests at once.

    python -m benchmarks.cpu [--model smollm2] [--new-tokens 64] [--threads N] [--json FILE]

All are greedy. Ours runs in float32, in the model's own dtype, and with its weights of fewer bits
as its file stores them; `--quantize fp8,int4` rounds them besides. Ours in float32, with dense
weights and with stored ones, and transformers.generate have the same numbers, and their tokens must
be equal before anything is timed. llama.cpp reads the model's own .gguf file, where the package
llama-cpp-python is installed. Runs alternate; medians are compared. Last comes the most memory that
one answer takes of a process of its own.

With `--together` 8 requests of mixed lengths go through the engine, at once and one after the other
in turns, in the same forms; their tokens must be equal. llama.cpp decodes as many sequences.
"""

from __future__ import annotations

import json
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
from benchmarks.common.one_stream import Run, run_ours
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.tables import Table
from benchmarks.engines.llama_cpp import LlamaCpp, opened, why_absent
from benchmarks.engines.process import run_module
from photon_ext import Engine, SamplingParams
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.model_files import resolve_model
from photon_ext.models.requantize import CHOICES
from photon_ext.models.text.model_tokenizer import model_tokenizer
from photon_ext.models.weights import DecoderWeights

PROMPT = "The first thing that a traveller sees on coming over the pass is the lake, and behind it"
MOST_THREADS = 256  # of our kernels (csrc/cpu/parallel.cpp)
BASE = "transformers float32"
TOGETHER = ((16, 56), (40, 48), (64, 40), (24, 64), (120, 32), (200, 48), (8, 96), (30, 72))
"""Tokens of prompts and answers, of requests at once."""
LONGEST = max(map(sum, TOGETHER))
HEADER = ("", "tokens/s", "ratio", "decode tokens/s", "ratio", "first token ms", "MiB/step")
CPU = torch.device("cpu")
PEAK_MEMORY, PATIENCE_S = "benchmarks.engines.peak_memory", 300.0


Side = Callable[[], Run]


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


def run_llama_cpp(llama: LlamaCpp, prompt: list[int], count: int) -> Run:
    """One sequence."""
    (tokens,), first_s, rest_s = llama.generate([prompt], [count])
    return Run(tokens, first_s, rest_s)


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
    return model_tokenizer(resolve_model(name)).encode(prompt)


class Form(NamedTuple):
    """How our weights lie in memory.

    Attributes:
        dtype: None: the model's own.
        quantize: as open_model takes it.
    """

    dtype: torch.dtype | None
    quantize: str

    def open(self, model: str) -> tuple[ModelConfig, DecoderWeights]:
        return open_model(model, self.dtype, CPU, self.quantize)


def forms_of(model: str, rounded: list[str]) -> dict[str, Form]:
    """By their titles: float32 and the model's own dtype with all weights dense; "stored", where a
    file has some in fewer bits; and what they are to be rounded to. Of each the first.
    """
    default = Form(None, "none").open(model)[1]
    forms = {
        "float32": Form(torch.float32, "none"),
        str(default.dtype).removeprefix("torch."): Form(None, "none"),
    }
    if model not in SHAPES and Form(None, "stored").open(model)[0].quantization is not None:
        forms["stored"] = Form(None, "stored")
    return forms | {name: Form(None, name) for name in rounded}


def gguf_of(name: str) -> Path | None:
    """The model's .gguf file, where it is one."""
    path = None if name in SHAPES else resolve_model(name)
    return path if path is not None and path.suffix == ".gguf" else None


def rates(runs: list[Run], new_tokens: int) -> dict[str, float]:
    """Medians: tokens/s from prompt to end, tokens/s after the first token, ms to the first."""
    return {
        "tokens_per_s": new_tokens / median(run.first_s + run.rest_s for run in runs),
        "decode_tokens_per_s": (new_tokens - 1) / median(run.rest_s for run in runs),
        "ttft_ms": median(run.first_s for run in runs) * 1e3,
    }


def compare(args: Namespace, result: ResultFile) -> dict[str, Any]:
    """Everything but memory, in one run."""
    count, forms = args.new_tokens, forms_of(args.model, args.quantize)
    config, exact = forms["float32"].open(args.model)
    prompt = encode(args.model, args.prompt, config.vocab)
    expected = run_ours(config, exact, prompt, count).tokens
    theirs = partial(run_transformers, reference_model(args.model, config, exact), prompt, count)
    check_equal(expected, theirs().tokens, "transformers says")
    if "stored" in forms:
        stored = Form(torch.float32, "stored").open(args.model)
        told = "with the weights as stored it is"
        check_equal(expected, run_ours(*stored, prompt, count).tokens, told)
        del stored
    sides: dict[str, Side] = {}
    step_mib: dict[str, float] = {}
    for title, form in forms.items():
        config, weights = form.open(args.model)
        sides[title] = partial(run_ours, config, weights, prompt, count)
        step_mib[title] = weights.bytes_per_step / 2**20
    sides[BASE] = theirs
    absent = why_absent(args.gguf)
    with opened(None if absent else args.gguf, len(prompt) + count, args.threads) as llama:
        if llama is not None:
            sides["llama.cpp"] = partial(run_llama_cpp, llama, prompt, count)
        runs = by_turns(sides, args.repeats, result)
        about = absent if llama is None else llama.about
    measured = {label: rates(own, count) for label, own in runs.items()}
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": count,
        "threads": torch.get_num_threads(),
        "tokens_equal": True,
        "step_mib": step_mib,
        "rates": measured,
        "ratio": _ratios(measured, "tokens_per_s"),
        "decode_ratio": _ratios(measured, "decode_tokens_per_s"),
        "llama_cpp": about,
    }


def peak_memory(args: Namespace) -> dict[str, Any]:
    """MiB of ours with the weights as stored, and of llama.cpp: the most of a process, and how much
    of it came after torch was imported.
    """
    config = Form(None, "stored").open(args.model)[0]
    task = {"prompt": encode(args.model, args.prompt, config.vocab), "count": args.new_tokens}
    task |= {"threads": args.threads, "quantize": "stored"}
    tasks = {"ours": {**task, "model": args.model}}
    if not why_absent(args.gguf):
        tasks["llama.cpp"] = {**task, "model": str(args.gguf)}
    found: dict[str, Any] = {}
    for side, one in tasks.items():
        heard: list[dict[str, Any]] = []
        given = json.dumps({**one, "side": side})
        failure = run_module(PEAK_MEMORY, [], PATIENCE_S, given, hear=heard.append)
        if failure is not None:
            raise BenchmarkError(f"{side}: {failure}")
        (found[side],) = heard
    return found


def by_turns(sides: dict[str, Side], repeats: int, result: ResultFile) -> dict[str, list[Run]]:
    """A run of each side, again and again, behind one to warm up."""
    warm_up = {label: side() for label, side in sides.items()}
    runs: dict[str, list[Run]] = {label: [] for label in sides}
    for round_ in range(repeats):
        for label, side in sides.items():
            result.progress.show(f"cpu: {label}, run {round_ + 1} of {repeats}")
            runs[label].append(side())
            if runs[label][-1].tokens != warm_up[label].tokens:
                raise BenchmarkError(f"the tokens of {label} differ from run to run")
    return runs


def together(
    args: Namespace, form: Form, llama: LlamaCpp | None, result: ResultFile
) -> dict[str, Any]:
    """Requests at once against the same one after the other, and llama.cpp's sequences of the same
    lengths, in turns.
    """
    config, weights = form.open(args.model)
    choose = Random(7)
    prompts = [[choose.randrange(config.vocab) for _ in range(size)] for size, _ in TOGETHER]
    counts = [size for _, size in TOGETHER]
    params = [SamplingParams(max_new_tokens=size, ignore_eos=True) for size in counts]
    options = {"max_rows": len(TOGETHER), "max_len": LONGEST, "prefix_cache": False}
    with Engine.from_weights(config, weights, None, **options) as engine:

        def alone() -> list[list[int]]:
            pairs = zip(prompts, params, strict=True)
            return [list(engine.generate([prompt], one)[0].token_ids) for prompt, one in pairs]

        def at_once() -> list[list[int]]:
            return [list(one.token_ids) for one in engine.generate(prompts, params)]

        sides = {"one_by_one": alone, "at_once": at_once}
        if llama is not None:
            sides["llama_cpp"] = lambda: llama.generate(prompts, counts).tokens
        if at_once() != alone():
            raise BenchmarkError("tokens of requests at once are not those of the same alone")
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for round_ in range(args.repeats):
            for side, run in sides.items():
                result.progress.show(f"cpu: {weights.dtype}, {side}, run {round_ + 1}")
                begin = time.perf_counter()
                found = run()
                seconds[side].append(time.perf_counter() - begin)
                if [len(one) for one in found] != counts:
                    raise BenchmarkError(f"{side}: lengths {[*map(len, found)]}, not {counts}")
    tokens_per_s = {side: sum(counts) / median(own) for side, own in seconds.items()}
    return {
        "requests": len(TOGETHER),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "tokens_equal": True,
        "tokens_per_s": tokens_per_s["at_once"],
        "one_by_one_tokens_per_s": tokens_per_s["one_by_one"],
        "llama_cpp_tokens_per_s": tokens_per_s.get("llama_cpp"),
        "ratio": tokens_per_s["at_once"] / tokens_per_s["one_by_one"],
        "runs_s": seconds,
    }


def check_equal(ours: list[int], theirs: list[int], told: str) -> None:
    """Raises BenchmarkError at the first token that differs."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise BenchmarkError(f"token {at} is {a}, {told} {b}")


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
    """Measures and prints it, and memory; False: one failed."""
    labels = {"what": "single stream", "model": args.model, "device": "cpu"}
    entry = result.measure(labels, partial(compare, args, result))
    if entry is None:
        return False
    rows = []
    for label, own in entry["rates"].items():
        whole, decode = entry["ratio"][label], entry["decode_ratio"][label]
        rates_ = own["tokens_per_s"], whole, own["decode_tokens_per_s"], decode
        rows.append([label, *rates_, own["ttft_ms"], entry["step_mib"].get(label)])
    sizes = f"{entry['new_tokens']} new tokens after {entry['prompt_tokens']}"
    print(f"{args.model}: {sizes}, {entry['threads']} threads, float32 tokens equal")
    Table("", HEADER, rows).show()
    print(f"llama.cpp: {entry['llama_cpp']}")
    memory = result.measure({**labels, "what": "peak memory"}, partial(peak_memory, args))
    for side in ("ours", "llama.cpp") if memory is not None else ():
        if (own := memory.get(side)) is not None:
            told = f"{own['added_mib']:.0f} MiB behind the import of torch"
            print(f"{side}: {told}, {own['peak_mib']:.0f} in all")
    return memory is not None


def requests_together(args: Namespace, result: ResultFile) -> bool:
    """The same for requests at once, in all forms."""
    ok, prompts = True, sum(size for size, _ in TOGETHER)
    path = None if why_absent(args.gguf) else args.gguf
    with opened(path, LONGEST, args.threads, len(TOGETHER), prompts) as llama:
        forms = forms_of(args.model, args.quantize)
        if unknown := [name for name in args.forms or () if name not in forms]:
            print(f"--forms {', '.join(unknown)}: unknown; known are {', '.join(forms)}")
            return False
        for name in args.forms or forms:
            form = forms[name]
            labels = {"what": "together", "model": args.model, "device": "cpu", "of": name}
            entry = result.measure(labels, partial(together, args, form, llama, result))
            if entry is not None:
                rates_ = f"{entry['tokens_per_s']:.1f} and {entry['one_by_one_tokens_per_s']:.1f}"
                told = f"{entry['requests']} requests at once and one by one {rates_} tokens/s"
                print(f"{name}: {told}, x{entry['ratio']:.2f}, tokens equal")
                if (theirs := entry["llama_cpp_tokens_per_s"]) is not None:
                    print(f"  llama.cpp {theirs:.1f}, ours x{entry['tokens_per_s'] / theirs:.2f}")
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
    told = "beside the other forms: fp8, int4, or both"
    add("--quantize", type=cli.some_of(CHOICES[2:]), default=[], help=told)
    told = "only these of the forms that it would measure, such as float32,stored"
    add("--forms", type=cli.names, help=f"with --together: {told}")
    args = options.parse_args(given)
    args.threads = args.threads or photon_ext.num_threads()
    photon_ext.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    result = ResultFile("cpu", args, args.json)
    args.gguf = gguf_of(args.model)
    show = requests_together if args.together else single_stream
    return 0 if show(args, result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
