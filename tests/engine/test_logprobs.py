"""Log-probabilities as callers see them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import VOCAB, saved_tiny_model


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("graph", [True, False])
def test_they_are_those_of_transformers(depth: int, graph: bool, tmp_path: Path) -> None:
    """Beside requests that ask for none, others, and with filters."""
    model = saved_tiny_model("qwen3-6-3-24", tmp_path)
    prompts = [prompt_of(length, VOCAB) for length in (3, 24, 7)]
    params = [
        SamplingParams(12, temperature=1.0, seed=seed, top_k=8, logprobs=count, ignore_eos=True)
        for seed, count in enumerate((0, None, 5))
    ]
    with tiny_engine(tmp_path, depth, graph=graph) as engine:
        outputs = engine.generate(prompts, params)
        events = list(engine.submit(prompts[2], params[2]).iter())
    assert outputs[1].logprobs == ()
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        if own.logprobs is None:
            continue
        tokens = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            expected = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(1)
        assert len(output.logprobs) == 12
        for found, row, token in zip(output.logprobs, expected, output.token_ids, strict=True):
            assert found.sampled == pytest.approx(float(row[token]), abs=1e-4)
            values, ids = row.topk(own.logprobs)
            assert [id_ for id_, _ in found.top] == ids.tolist()
            assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert tuple(event.logprobs for event in events if event.token_ids) == outputs[2].logprobs
    assert events[-1].logprobs is None


def test_processed_ones_are_at_the_temperature_and_with_biases(tmp_path: Path) -> None:
    model, prompt = saved_tiny_model("qwen3-6-3-24", tmp_path), prompt_of(9, VOCAB)
    params = SamplingParams(
        10,
        temperature=0.7,
        seed=3,
        logit_bias={5: 2.5},
        logprobs=3,
        logprobs_mode="processed",
        ignore_eos=True,
    )
    with tiny_engine(tmp_path, 2) as engine:
        output = engine.generate([prompt], params)[0]
    tokens = torch.tensor([[*prompt, *output.token_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    logits[:, 5] += 2.5
    for found, row, token in zip(
        output.logprobs, (logits / 0.7).log_softmax(1), output.token_ids, strict=True
    ):
        assert found.sampled == pytest.approx(float(row[token]), abs=1e-4)
        assert [id_ for id_, _ in found.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("depth", [1, 2])
def test_each_token_has_its_own_however_the_request_ends(depth: int) -> None:
    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer()) as engine:
        plain = engine.generate(["Hello"], SamplingParams(20), raw=True)[0]
    asked = [
        {"stop": next(letter for letter in plain.text if letter.isascii())},
        {"stop_token_ids": plain.token_ids[5:6]},
        {"constraint": from_allowed_ids(range(40, 80))},
        {"max_new_tokens": 1},
    ]
    with engine_on(WatchedDevice(depth=depth), tokenizer=byte_tokenizer()) as engine:
        requests = [
            engine.submit(
                "Hello", SamplingParams(**{"max_new_tokens": 20, **own}, logprobs=2), raw=True
            )
            for own in asked
        ]
        for request in requests:
            output = request.result(30)
            assert len(output.logprobs) == len(output.token_ids) > 0
            for found, token in zip(output.logprobs, output.token_ids, strict=True):
                assert len(found.top) == 2
                assert found.top[0] == (token, found.sampled)  # greedy
