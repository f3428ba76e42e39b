"""Answers to many JSON schemas: whether each that ended is of its schema, and each cut one begins
so.

    python -m benchmarks.schemas FILE.jsonl [--model smollm2] [--rows 32] [--json FILE]

A line of the file is an object with `name` and `schema`. At temperature 0 and at 1, an answer to
each schema is generated, `--rows` at a time, with plain requests among them, whose tokens have to
be those that they get alone. An answer that its grammar ended has to parse and to validate
(jsonschema); one that its cap cut has to be a beginning that the matcher takes. Times of
compilation are those of the first request; times of masks are of the same answers once more. Told
as well is which schemas the device keeps, as automata, and why the host keeps the others.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from typing import Any

import jsonschema

from benchmarks.common import options as cli
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from photon_ext import Engine, SamplingParams
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.output import Output
from photon_ext.engine.sizing import CPU_AUTOMATA_MIB
from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.loading.loader import load_model
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.pattern import NotRegular

PLAIN = ("Why is the sky blue?", "Count to ten.", "A poem on rain.")
REQUEST = "Write a JSON example of the schema "
REASON = 60  # characters of a refusal that tell its kind
SHOWN = 300  # characters of a schema in a prompt


class Bench:
    """An engine, the schemas it serves, and why it refuses the others."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        loaded = load_model(args.model)
        if loaded.tokenizer is None:
            raise BenchmarkError(f"{args.model} has no tokenizer; use a model that does")
        config, tokenizer = loaded.config, loaded.tokenizer
        words = CPU_AUTOMATA_MIB * 2**18  # as the engine has
        self._compiler = GrammarCompiler(tokenizer, config.vocab, config.eos_ids, words)
        rows = args.rows
        sizes = {"max_rows": rows, "max_len": 1024, "chunk": 256, "buckets": (1, rows)}
        self.engine = Engine.from_weights(config, loaded.weights, tokenizer, **sizes)
        self._words = memoryview(bytearray(-(-config.vocab // 32) * 4)).cast("i")
        self.compile_us: list[float] = []
        self.automaton_us: list[float] = []
        self.on_host: Counter[str] = Counter()
        self.fill_us: list[float] = []
        self.refused: Counter[str] = Counter()
        lines = Path(args.file).read_text().splitlines()[: args.limit]
        self._constraint({})  # makes the vocabulary
        self.served = [line for line in map(json.loads, lines) if self._serves(line["schema"])]

    def _serves(self, schema: Any) -> bool:
        begin = time.perf_counter()
        try:
            self._constraint(schema)
        except (RequestError, ConfigError) as error:
            _, _, why = str(error).partition(" is refused: ")
            self.refused[(why or str(error)).partition("; ")[0][:REASON]] += 1
            return False
        self.compile_us.append((time.perf_counter() - begin) * 1e6)
        self._note_place(schema)
        return True

    def _note_place(self, schema: Any) -> None:
        """Whether the device keeps it."""
        begin = time.perf_counter()
        try:
            self._compiler.automaton(_grammar(schema))
        except NotRegular as error:
            self.on_host[str(error)[:REASON]] += 1
        else:
            self.automaton_us.append((time.perf_counter() - begin) * 1e6)

    def _constraint(self, schema: Any) -> Any:
        return self._compiler.start(_grammar(schema))

    def measure(self, temperature: float) -> dict[str, Any]:
        """Answers to all of them at this temperature."""
        plain = SamplingParams(self._args.cap, temperature, seed=1)
        alone = [self.engine.generate([prompt], plain)[0].token_ids for prompt in PLAIN]
        counts: Counter[str] = Counter()
        step = self._args.rows - len(PLAIN)
        for begin in range(0, len(self.served), step):
            asked = self.served[begin : begin + step]
            formed = [
                SamplingParams(self._args.cap, temperature, seed=i, json_schema=one["schema"])
                for i, one in enumerate(asked)
            ]
            prompts = [*PLAIN, *(REQUEST + json.dumps(one["schema"])[:SHOWN] for one in asked)]
            outputs = self.engine.generate(prompts, [plain] * len(PLAIN) + formed)
            found = [output.token_ids for output in outputs[: len(PLAIN)]]
            counts["plain rows"] += len(PLAIN)
            counts["plain rows with their tokens"] += sum(map(alone.__contains__, found))
            for one, output in zip(asked, outputs[len(PLAIN) :], strict=True):
                counts[self._judged(one["schema"], output)] += 1
        wrong = counts["invalid"] + counts["no beginning"] + counts["error"]
        kept = counts["plain rows with their tokens"] == counts["plain rows"]
        return {"counts": counts, "passed": wrong == 0 and kept}

    def _judged(self, schema: Any, output: Output) -> str:
        if output.finish_reason == "error":
            print(f"{schema!r:.300}: {output.error}")
            return "error"
        constraint = self._constraint(schema)
        for token in output.token_ids:
            begin = time.perf_counter()
            constraint.fill_bitmask(self._words)
            self.fill_us.append((time.perf_counter() - begin) * 1e6)
            if not self._words[token >> 5] >> (token & 31) & 1:
                return "no beginning"
            constraint.advance(token)
        if output.finish_reason == "length" and not constraint.finished:
            return "cut, a beginning"
        try:
            jsonschema.validate(json.loads(output.text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"{schema!r:.300}: {output.text!r:.300}: {error!s:.300}")
            return "invalid"
        return "ended and valid"


def _grammar(schema: Any) -> Grammar:
    grammar = SamplingParams(json_schema=schema).answer_grammar
    assert grammar is not None
    return grammar


def spread(values: list[float]) -> dict[str, float] | None:
    """Percentiles of some microseconds; None where there are too few."""
    if len(values) < 2:
        return None
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def main(given: list[str] | None = None) -> int:
    options = cli.plain_parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("file", type=Path, help="a schema a line, as {'name': ..., 'schema': ...}")
    add("--model", default="smollm2", help="smollm2, or a model's path; it runs on the CPU")
    add("--rows", type=cli.positive_integer, default=32, help="rows of the engine, above 3")
    add("--cap", type=cli.positive_integer, default=96, help="tokens of an answer")
    add("--limit", type=cli.positive_integer, help="schemas; default: all")
    add("--json", type=cli.result_file, metavar="FILE", help="write the result here")
    args = options.parse_args(given)
    told = Namespace(**{**vars(args), "file": args.file.name})
    result = ResultFile("schemas", told, args.json)
    bench = Bench(args)
    with bench.engine:
        for temperature in (0.0, 1.0):
            labels = {"what": "schemas", "model": args.model, "temperature": temperature}
            result.measure(labels, partial(bench.measure, temperature))
    result.set(
        llguidance=metadata.version("llguidance"),
        served=len(bench.served),
        refused=dict(bench.refused.most_common()),
        on_device=len(bench.automaton_us),
        on_host=dict(bench.on_host.most_common()),
        compile_us=spread(bench.compile_us),
        automaton_us=spread(bench.automaton_us),
        fill_us=spread(bench.fill_us),
    )
    for table in tables_of(result.data):
        table.show()
    return 0 if all(entry.get("passed") for entry in result.entries) else 1


if __name__ == "__main__":
    sys.exit(main())
