"""The same seed gives the same tokens, whatever runs beside a request and however steps are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from photon_ext.sampling import SamplingParams
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import VOCAB, saved_tiny_model

COMBINED = {
    "temperature": 0.9,
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 1.5, 9: -2.0},
    "min_tokens": 4,
    "logprobs": 2,
    "logprobs_mode": "processed",
}
KINDS = ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.3}, {"presence_penalty": 1.0}, COMBINED)
PROMPTS = [prompt_of(length, VOCAB) for length in (3, 30, 12, 7, 21, 16)]
PARAMS = [
    SamplingParams(24, **{"temperature": 1.1, **kind}, seed=seed, ignore_eos=True)
    for seed, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A model, and the tokens of each request where it is the only one, at depth 1."""
    folder = tmp_path_factory.mktemp("model")
    saved_tiny_model("qwen3-6-3-24", folder)
    with tiny_engine(folder, 1, graph=False) as engine:
        return folder, [
            engine.generate([prompt], own)[0].token_ids
            for prompt, own in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefill", ["mixed", "separate"])
@pytest.mark.parametrize("pages", [None, 22], ids=["calm", "preempted"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "resumed"])
def test_tokens_are_those_of_a_request_alone(
    alone: tuple[Path, list[tuple[int, ...]]],
    depth: int,
    prefill: str,
    pages: int | None,
    exact: bool,
) -> None:
    folder, expected = alone
    options = {} if pages is None else {"num_pages": pages}
    with tiny_engine(folder, depth, prefill=prefill, exact=exact, **options) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert (engine.stats().preemptions > 0) == (pages is not None)
    assert [output.token_ids for output in outputs] == expected
    assert [len(output.logprobs) for output in outputs] == [0, 0, 0, 0, 0, 24]
