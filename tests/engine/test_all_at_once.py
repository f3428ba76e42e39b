"""Requests that ask for several things at once: adapters, forms of answers on the device and on the
host, log-probabilities of prompts and answers, penalties, several answers, embeddings in prompts,
objects. Each has what it has alone, also where pages, slots and places are few, so that rows lose
them and come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import llguidance  # noqa: F401  without it these tests are left out
import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.common.formats import converted
from photon_ext.engine import Engine, Request
from photon_ext.engine.output import Output
from photon_ext.engine.prompts import Prompt
from photon_ext.engine.request_options import RequestKeywords
from photon_ext.models.loading.loader import LoadedModel, load_model
from photon_ext.runtime import TokenLogprobs
from photon_ext.sampling import SamplingParams
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.test_embeds import image_of
from tests.engine.test_engine_models import held_behind_its_first_step, prompt_of
from tests.models.adapters import adapter_tensors, saved_adapter
from tests.models.regions import random_heads
from tests.models.stored_gguf import FAMILIES, write_stored_gguf
from tests.models.tiny import VOCAB, saved_tiny_model

WORD = {"regex": "[a-z]{24,30}"}  # on the device
NESTED = {"grammar": 'start: "(" start ")" | "[" start "]" | "x"'}  # on the host


class Asked(NamedTuple):
    """A request of two answers; `image`: embeddings before the tokens of its prompt."""

    length: int
    params: dict[str, Any]
    lora: str | None = None
    image: int = 0
    options: RequestKeywords | None = None


ASKED = (
    Asked(14, {"temperature": 1.0, "prompt_logprobs": 2, "logprobs": 1, **WORD}, "one"),
    Asked(13, {"temperature": 1.0, "prompt_logprobs": 1, "logprobs": 2, **NESTED}, "two"),
    Asked(14, {"temperature": 1.5, "repetition_penalty": 1.4, "min_tokens": 5, **WORD}),
    Asked(9, {"temperature": 1.0, "frequency_penalty": 0.7, "prompt_logprobs": 0}, "two"),
    Asked(3, {"temperature": 1.0, "logprobs": 1, "presence_penalty": 0.5, **WORD}, "one", 11),
    Asked(4, {"frequency_penalty": 0.7}, "two", 9, {"skill": "detect", "max_objects": 7}),
    Asked(5, {"temperature": 1.0}, None, 9, {"skill": "point", "max_objects": 9}),
    Asked(14, {"top_k": 9, "temperature": 1.0, "logit_bias": {40: 3.0}, "stop": ["Q", "zz"]}),
)


class Parts(NamedTuple):
    """A tiny model, and its adapters."""

    model: LoadedModel
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = tmp_path_factory.mktemp("all")
    model = saved_tiny_model("qwen3-tied", folder / "model")
    adapters = {
        name: saved_adapter(folder / name, adapter_tensors(model, 4, seed), 4)
        for seed, name in enumerate(("one", "two"))
    }
    return Parts(load_model(folder / "model", "float32", torch.device("cpu")), adapters)


def engine_of(parts: Parts, **options: Any) -> Engine:
    sizes = {"max_rows": 6, "max_len": 64, "page_size": 4, "chunk": 9, "automata_mib": 1}
    (config, weights, _), options = parts.model, {**sizes, **options}
    heads = random_heads(config.hidden)
    engine = Engine.from_weights(
        config, weights, byte_tokenizer(), None, heads, penalties=True, embeds_tokens=12, **options
    )
    for name, path in parts.adapters.items():
        engine.load_lora(name, path)
    return engine


def answers(engine: Engine, together: bool) -> list[Output]:
    found: list[Request] = []
    with held_behind_its_first_step(engine) if together else nullcontext():
        for seed, (length, params, lora, image, options) in enumerate(ASKED):
            own = SamplingParams(30, seed=10 * seed, ignore_eos=True, **params)
            prompt: Prompt = prompt_of(length, VOCAB)
            if image:
                prompt = {"prompt_embeds": [image_of(64, image), prompt]}
            found += engine.submit(prompt, own, n=2, lora=lora, **options or {})
            if not together:
                for request in found:
                    request.result()
    return [request.result() for request in found]


@pytest.fixture(scope="module")
def alone(parts: Parts) -> Iterator[list[Output]]:
    with engine_of(parts, max_rows=1, lora_slots=2, prefix_cache=False) as engine:
        yield answers(engine, together=False)


def assert_close(found: tuple[TokenLogprobs, ...], expected: tuple[TokenLogprobs, ...]) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert own.sampled == pytest.approx(other.sampled, abs=1e-4)
        assert [id_ for id_, _ in own.top] == [id_ for id_, _ in other.top]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_each_has_what_it_has_alone(
    parts: Parts, alone: list[Output], depth: int, exact: bool, slots: int
) -> None:
    options = {"depth": depth, "exact": exact, "lora_slots": slots, "num_pages": 14}
    with engine_of(parts, **options) as engine:
        found = answers(engine, together=True)
    stats = engine.stats()  # behind the close, which waits for the rows
    assert stats.preemptions > 0
    for output, expected in zip(found, alone, strict=True):
        assert output.error is None
        assert output.token_ids == expected.token_ids
        assert (output.text, output.objects) == (expected.text, expected.objects)
        assert output.stop_reason == expected.stop_reason
        assert output.constraint_on == expected.constraint_on
        assert_close(output.logprobs, expected.logprobs)
        assert_close(output.prompt_logprobs, expected.prompt_logprobs)
    assert [bool(output.prompt_logprobs) for output in found[::2]] == [
        True,
        True,
        False,
        True,
        *[False] * 4,
    ]
    assert {str(output.constraint_on)[:6] for output in found} == {"device", "host: ", "None"}
    assert [len(output.objects) for output in found[10:14]] == [7, 7, 9, 9]
    assert engine._scheduler._pager._embeds.free == 12
    assert stats.automata_held == stats.pages_held == stats.rows_held == 0


@pytest.mark.parametrize(
    ("quantize", "depth", "exact"),
    [("stored", 1, False), ("stored", 2, True), ("fp8", 2, False), ("int4", 2, True)],
)
def test_stored_weights_answer_as_the_same_numbers_do(
    quantize: str, depth: int, exact: bool, tmp_path: Path
) -> None:
    """Of a GGUF file in blocks, also of the embeddings, which are the head."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    values = {**FAMILIES["qwen3"], **sizes}
    path = tmp_path / "m.gguf"
    model = write_stored_gguf(values, path, lambda name: GGMLQuantizationType.Q5_0)
    adapters = {
        name: saved_adapter(tmp_path / name, adapter_tensors(model, 4, seed), 4)
        for seed, name in enumerate(("one", "two"))
    }
    config, weights, _ = load_model(path, "float32", "cpu", quantize)
    head = replace(weights.head, bias=None)  # the file's tokenizer is not the one here
    stored = LoadedModel(config, replace(weights, head=head), None)
    config = replace(config, quantization=None)
    dense = LoadedModel(config, converted(config, stored.weights, torch.float32), None)
    found = []
    for loaded in (stored, dense):
        options = {"depth": depth, "exact": exact, "lora_slots": 2, "num_pages": 14}
        with engine_of(Parts(loaded, adapters), **options) as engine:
            found.append(answers(engine, together=True))
            assert engine.stats().prefix_hit_tokens > 0
    assert stored.weights.nbytes < 0.4 * dense.weights.nbytes
    for output, expected in zip(*found, strict=True):
        assert output.error is None
        assert output.token_ids == expected.token_ids
        assert (output.text, output.objects) == (expected.text, expected.objects)
        assert output.logprobs == expected.logprobs
        assert output.prompt_logprobs == expected.prompt_logprobs
