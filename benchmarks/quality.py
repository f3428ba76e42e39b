"""Quality beside speed: a model in each weight format against the same model as it was loaded.

    python -m benchmarks.quality [--model smollm2] [--formats bfloat16,fp8,int4] [--json FILE]

Over a fixed text (random ids for random weights): the KL divergence of what follows each token from
what the reference says, the share of tokens after which both say the same, and the perplexity of
the text. Beside them the bytes of weights that a decode step reads, and ms per step of one stream
through the engine. In fp8 and int4 weights are rounded to nearest and run as stored. With
`--kv-dtype fp8` keys and values of all formats are in fp8 besides, but not those of the reference;
`--formats float32 --kv-dtype fp8` shows what that alone changes. With `--activations fp8` tokens
are in fp8 as well where weights are.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.common import options as cli
from benchmarks.common.divergence import divergence, perplexity
from benchmarks.common.engine_steps import through_engine
from benchmarks.common.formats import FORMATS, Candidate, in_format
from benchmarks.common.logits import CHUNK, text_logits
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.common.session import random_prompts
from photon_ext.checks import Activations, KvDtype
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import LEAST_FP8_BATCH_TOKENS

TEXT = Path(__file__).parent / "data" / "quality.txt"
ON_GPU = {"model": ["qwen3-0.6b"]}
ON_CPU = {"model": ["smollm2"]}
OF_SHAPE = {"cuda": 2048, "cpu": 256}  # random ids
FEWEST = 2  # tokens; the second is the first that can be foretold


class Bench:
    """One model as it was loaded, its text, and what it says of it.

    Args:
        name: a real model, or one of SHAPES.
        dtype: of the reference.
        device: where all runs.
        args: the other options.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, device: torch.device, args: Namespace
    ) -> None:
        self._name, self._args = name, args
        self._config, self._weights = open_model(name, dtype, device, "none")
        self._ids = text_ids(name, self._config, args.text, args.tokens, device)
        self._expected: torch.Tensor | None = None

    def reference(self) -> dict[str, Any]:
        """What all formats are compared with; measured first."""
        candidate = Candidate(self._config, self._weights)
        self._expected = self._logits(candidate)
        return self._figures(candidate, self._expected)

    def compare(self, form: str) -> dict[str, Any]:
        """One of FORMATS."""
        assert self._expected is not None
        candidate, kv_dtype = in_format(form, self._config, self._weights), self._args.kv_dtype
        activations = self._args.activations if form == "fp8" else None
        found = self._logits(candidate, kv_dtype, activations)
        figures = self._figures(candidate, found, kv_dtype, has_speed=activations is None)
        return {**figures, **divergence(self._expected, found)}

    def _logits(
        self,
        candidate: Candidate,
        kv_dtype: KvDtype | None = None,
        activations: Activations | None = None,
    ) -> torch.Tensor:
        return text_logits(*candidate, self._ids, self._args.chunk, kv_dtype, activations)

    def _figures(
        self,
        candidate: Candidate,
        logits: torch.Tensor,
        kv_dtype: KvDtype | None = None,
        has_speed: bool = True,
    ) -> dict[str, Any]:
        """`has_speed`: steps of one stream run as the text's."""
        speed: float | None = None
        if has_speed and not self._args.no_speed:
            speed = through_engine(*candidate, 1, False, kv_dtype)["ms_per_step"]
        return {
            "tokens": len(self._ids),
            "perplexity": perplexity(logits, self._ids),
            "step_mib": candidate.weights.bytes_per_step / 2**20,
            "ms_per_step": speed,
        }


def text_ids(
    name: str, config: ModelConfig, text: Path, tokens: int | None, device: torch.device
) -> list[int]:
    """The first tokens of a text, at most as many as the model has positions for; random ids for
    random weights.
    """
    if name in SHAPES:
        count = min(tokens or OF_SHAPE[device.type], config.longest)
        return random_prompts(config.vocab, 1, max(FEWEST, count))[0]
    # a GPU's machine may have torch alone, and random weights
    from photon_ext.models.loading.model_files import resolve_model
    from photon_ext.models.text.model_tokenizer import model_tokenizer

    ids = model_tokenizer(resolve_model(name)).encode(text.read_text(encoding="utf-8"))
    ids = ids[: min(tokens or len(ids), config.longest)]
    if len(ids) < FEWEST:
        raise BenchmarkError(f"{text} has {len(ids)} tokens of {name}; give {FEWEST} or more")
    return ids


def run_model(name: str, device: torch.device, args: Namespace, result: ResultFile) -> None:
    """An entry for the reference, then one for each format."""
    labels = {"what": "quality", "model": name, "device": str(device), "reference": args.dtype}
    made: list[Bench] = []

    def reference() -> dict[str, Any]:
        made.append(Bench(name, cli.DTYPES[args.dtype], device, args))
        return made[0].reference()

    if result.measure({**labels, "format": args.dtype}, reference) is None:
        return
    for form in args.formats:
        beside = f", {args.kv_dtype} kv" if args.kv_dtype else ""
        beside += ", fp8 activations" if args.activations and form == "fp8" else ""
        if form != args.dtype or beside:
            result.measure({**labels, "format": form + beside}, partial(made[0].compare, form))


def text_file(text: str) -> Path:
    """A file of text in UTF-8."""
    path = Path(text)
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{text!r} cannot be read as text: {error}") from None
    return path


def main(given: list[str] | None = None) -> int:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    cli.models_option(options)
    told = "of the reference, which is not rounded"
    add("--dtype", choices=cli.DTYPES, default="float32", help=told)
    default = "bfloat16,fp8,int4"
    add(
        "--formats",
        type=cli.some_of(FORMATS),
        default=default,
        help=f"some of {', '.join(FORMATS)}",
    )
    told = "of keys and values of the formats; default: theirs"
    add("--kv-dtype", choices=get_args(KvDtype), help=told)
    told = "what linears of the format fp8 read; default: the model's dtype"
    add("--activations", choices=get_args(Activations), help=told)
    add("--text", type=text_file, default=TEXT, help="a file; default: benchmarks/data/quality.txt")
    add("--tokens", type=cli.positive_integer, help="of the text; default: all")
    told = "tokens of a step; with 1 all are decode steps, whose kernels are others"
    add("--chunk", type=cli.positive_integer, default=CHUNK, help=told)
    add("--no-speed", action="store_true", help="without ms per step")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    if args.activations:
        if "fp8" not in args.formats:
            options.error(f"--activations {args.activations}: give fp8 in --formats, too")
        if args.chunk < LEAST_FP8_BATCH_TOKENS:
            told = f"in steps of --chunk {args.chunk} they are not rounded"
            options.error(f"--activations {args.activations}: {told}")
    told = Namespace(**{**vars(args), "text": args.text.name})
    result = ResultFile("quality", told, args.json)
    for name in args.model:
        run_model(name, cli.device_of(args.device), args, result)
    for table in tables_of(result.data):
        table.show()
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
