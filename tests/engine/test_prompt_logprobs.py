"""Log-probabilities of prompts, as callers see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from photon_ext.errors import RequestError
from photon_ext.runtime import TokenLogprobs
from photon_ext.sampling import SamplingParams
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import VOCAB, saved_tiny_model

Scores = tuple[TokenLogprobs, ...]


def assert_those_of(model: Any, prompt: list[int], found: Scores, count: int) -> None:
    """Of every token but the first, `count` likeliest each, as transformers' model has them."""
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(1)
    assert len(found) == len(prompt) - 1
    for own, row, token in zip(found, expected, prompt[1:], strict=True):
        assert own.sampled == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(count)
        assert [id_ for id_, _ in own.top] == ids.tolist()
        assert [value for _, value in own.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("prefill", ["mixed", "separate"])
def test_they_are_those_of_transformers(
    depth: int, graph: bool, prefill: str, tmp_path: Path
) -> None:
    """Through chunks of 16, beside requests that ask for none, whose tokens stay as they are."""
    model = saved_tiny_model("qwen3-6-3-24", tmp_path)
    prompts = [prompt_of(length, VOCAB) for length in (3, 40, 7, 1)]
    asked = (20, 4, None, 0)
    params = [
        SamplingParams(9, temperature=1.0, seed=seed, prompt_logprobs=count, logprobs=1)
        for seed, count in enumerate(asked)
    ]
    with tiny_engine(tmp_path, depth, graph=graph, prefill=prefill, chunk=16) as engine:
        outputs = engine.generate(prompts, params)
        plain = [
            engine.generate([prompt], SamplingParams(9, temperature=1.0, seed=seed, logprobs=1))[0]
            for seed, prompt in enumerate(prompts)
        ]
    for prompt, count, output, other in zip(prompts, asked, outputs, plain, strict=True):
        assert output.token_ids == other.token_ids
        assert [one.sampled for one in output.logprobs] == pytest.approx(
            [one.sampled for one in other.logprobs], abs=1e-5
        )
        if count is None:
            assert output.prompt_logprobs == ()
        else:
            assert_those_of(model, prompt, output.prompt_logprobs, count)


def test_cached_pages_give_none_away(tmp_path: Path) -> None:
    """A prompt whose pages are cached is computed again for them, and its pages serve others."""
    model, prompt = saved_tiny_model("qwen3-6-3-24", tmp_path), prompt_of(40, VOCAB)
    with tiny_engine(tmp_path, 2, page_size=4) as engine:
        first = engine.generate([prompt], SamplingParams(3))[0]
        scored = engine.generate([prompt], SamplingParams(3, prompt_logprobs=2))[0]
        last = engine.generate([prompt], SamplingParams(3))[0]
    assert first.token_ids == scored.token_ids == last.token_ids
    assert scored.cached_tokens == 0 < last.cached_tokens
    assert_those_of(model, prompt, scored.prompt_logprobs, 2)


def test_the_first_of_several_answers_has_them(tmp_path: Path) -> None:
    model, prompt = saved_tiny_model("qwen3-6-3-24", tmp_path), prompt_of(30, VOCAB)
    with tiny_engine(tmp_path, 2) as engine:
        first, second = engine.generate([prompt], SamplingParams(3, prompt_logprobs=2), n=2)
    assert_those_of(model, prompt, first.prompt_logprobs, 2)
    assert second.prompt_logprobs == ()


@pytest.mark.parametrize("exact", [False, True])
def test_a_preempted_request_has_each_once(exact: bool, tmp_path: Path) -> None:
    """And then finds its pages in the cache, as any other."""
    model, prompts = saved_tiny_model("qwen3-6-3-24", tmp_path), [prompt_of(9, VOCAB)] * 3
    prompts = [[*prompt, number] for number, prompt in enumerate(prompts)]
    params = SamplingParams(30, prompt_logprobs=1, ignore_eos=True)
    with tiny_engine(tmp_path, 2, page_size=4, num_pages=16, exact=exact) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.stats().preemptions > 0
        assert engine.stats().prefix_hit_tokens > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_those_of(model, prompt, output.prompt_logprobs, 1)


def test_an_engine_whose_forward_gives_none_says_so() -> None:
    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer()) as engine:
        with pytest.raises(RequestError, match="prompt_logprobs is 3, and this forward"):
            engine.submit("Hello", SamplingParams(4, prompt_logprobs=3), raw=True)
        assert engine.generate(["Hello"], SamplingParams(4), raw=True)[0].error is None
