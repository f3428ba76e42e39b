"""Penalties, logit biases and bad words as callers see them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from photon_ext.engine import Engine
from photon_ext.errors import RequestError
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import VOCAB, saved_tiny_model

INF = float("inf")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_repetition_penalty_is_that_of_transformers(depth: int, tmp_path: Path) -> None:
    """Also where the prompt is found in the prefix cache, and is never fed here."""
    model = saved_tiny_model("qwen3-6-3-24", tmp_path)
    prompts = [prompt_of(length, VOCAB) for length in (3, 24)]
    expected = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.7,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    params = SamplingParams(20, repetition_penalty=1.7, ignore_eos=True)
    with tiny_engine(tmp_path, depth) as engine:
        plain = engine.generate(prompts, SamplingParams(20, ignore_eos=True))
        found = [engine.generate(prompts, params) for _ in range(2)]
    assert found[1][1].cached_tokens == 20
    for outputs in found:
        assert [list(output.token_ids) for output in outputs] == expected
    assert [list(output.token_ids) for output in plain] != expected


def served(**options: object) -> Engine:
    return engine_on(WatchedDevice(), tokenizer=byte_tokenizer(), **options)


def test_a_bias_makes_a_token_sure_or_impossible() -> None:
    with served() as engine:
        plain = engine.generate(["Hello"], SamplingParams(12), raw=True)[0]
        sure = engine.generate(["Hello"], SamplingParams(12, logit_bias={65: 100}), raw=True)[0]
        assert sure.token_ids == (65,) * 12
        without = dict.fromkeys(plain.token_ids[:4], -INF)
        banned = engine.generate(["Hello"], SamplingParams(12, logit_bias=without), raw=True)[0]
    assert not set(banned.token_ids) & set(without)


def test_bad_words_are_not_sampled() -> None:
    with served() as engine:
        text = engine.generate(["Hello"], SamplingParams(12), raw=True)[0].text
        word = next(letter for letter in text if letter.isascii() and letter.isprintable())
        params = SamplingParams(60, temperature=50.0, bad_words=word, logit_bias={65: 1})
        assert params.bad_words == (word,)
        found = engine.generate(["Hello"] * 4, params, raw=True)
    assert all(word not in output.text for output in found)
    assert all(output.constraint_on is None for output in found)


@pytest.mark.parametrize("depth", [1, 2])
def test_bad_words_of_several_tokens_are_not_sampled(depth: int) -> None:
    letters = SamplingParams(30, logit_bias=dict.fromkeys(byte_tokenizer().encode("ABC"), 50))
    with engine_on(WatchedDevice(depth=depth), tokenizer=byte_tokenizer()) as engine:
        plain, other = engine.generate(["Hello", "World"], letters, raw=True)
        words = plain.text[4:6], plain.text[9:12]
        params = replace(letters, bad_words=words)
        found = engine.generate(["Hello", "World", "Hello"], [params, letters, params], raw=True)
        short = engine.generate(["Hello"], replace(params, max_new_tokens=1), raw=True)[0]
    assert set(plain.text) <= set("ABC")
    assert found[0].text == found[2].text != plain.text
    assert not any(word in found[0].text for word in words)
    assert (found[1].text, found[1].constraint_on) == (other.text, None)
    assert found[0].constraint_on == "host: bad_words has texts of several tokens"
    assert short.text == plain.text[0], "the first token of a word may come"


def test_bad_words_of_several_tokens_are_kept_beside_a_form() -> None:
    form = from_allowed_ids(byte_tokenizer().encode("AB"))
    params = SamplingParams(20, constraint=form, bad_words=["AA", "BB"])
    with served() as engine:
        found = engine.generate(["Hello"], params, raw=True)[0]
    assert found.text[:4] in ("ABAB", "BABA")
    assert found.text == found.text[:2] * 10


@pytest.mark.parametrize(
    "banned", [{"logit_bias": {65: -INF}}, {"stop_token_ids": (65,), "min_tokens": 2}]
)
def test_an_error_names_what_forbade_the_last_token(banned: dict[str, object]) -> None:
    with served() as engine:
        params = SamplingParams(4, constraint=from_allowed_ids([65]), **banned)
        output = engine.generate(["Hello"], params, raw=True)[0]
    assert output.finish_reason == "error"
    assert "logit_bias, bad_words or min_tokens forbid" in (output.error or "")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {256: 1.0}}, "logit_bias holds 256; token ids of this model are 0 to 255"),
        (
            {"logit_bias": dict.fromkeys(range(4), 1.0), "bad_words": "a"},
            "5 logit biases, those of bad_words included; a row has 4 at most",
        ),
    ],
)
def test_what_cannot_be_is_refused(params: dict[str, object], message: str) -> None:
    with served() as engine, pytest.raises(RequestError, match=message):
        engine.submit("Hello", SamplingParams(**params), raw=True)


@pytest.mark.parametrize(
    "params",
    [
        {"constraint": from_allowed_ids([65]), "logit_bias": {65: -INF}},
        {"constraint": from_allowed_ids([65]), "stop_token_ids": (65,), "min_tokens": 2},
        {"constraint": from_allowed_ids(byte_tokenizer().encode("a")), "bad_words": "a"},
    ],
)
def test_ids_that_are_forbidden_where_no_other_is_allowed_are_told(
    params: dict[str, object],
) -> None:
    with served() as engine:
        found, other = engine.generate(
            ["Hello"] * 2, [SamplingParams(9, **params), SamplingParams(9)], raw=True
        )
    assert found.finish_reason == "error"
    assert "logit_bias, bad_words or min_tokens forbid ids besides: allow more" in str(found.error)
    assert len(other.token_ids) == 9


def test_bad_words_need_a_tokenizer() -> None:
    with (
        engine_on(WatchedDevice()) as engine,
        pytest.raises(RequestError, match="bad_words holds 'a', and this engine has no tokenizer"),
    ):
        engine.submit([1], SamplingParams(bad_words="a"))


def test_an_engine_without_penalties_says_so(tmp_path: Path) -> None:
    saved_tiny_model("qwen3-6-3-24", tmp_path)
    with tiny_engine(tmp_path, 2, penalties=False) as engine:
        assert (
            engine.generate([[5, 6]], SamplingParams(3, logit_bias={7: 100}))[0].token_ids[0] == 7
        )
        with pytest.raises(RequestError, match="need the runtime's penalty_vocab, all of the "):
            engine.submit([1], SamplingParams(presence_penalty=0.5))
