"""Constraints that the device keeps, compared with the host's: the same answers, and no wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance  # noqa: F401  without it these tests are left out
import pytest

from photon_ext.engine import Engine
from photon_ext.engine.output import Output
from photon_ext.errors import ConfigError
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.constraints import from_allowed_ids
from tests.engine.test_engine_models import held_behind_its_first_step
from tests.engine.test_grammar import QUESTIONS, SCHEMAS, an_engine
from tests.serve.processes import until

CLOSED = {"additionalProperties": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "weight": {"type": "number", "minimum": 0},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", 7, None]}, "maxItems": 3},
        "married": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age"],
    **CLOSED,
}
FORMS: dict[str, dict[str, Any]] = {
    "call": {"json_schema": SCHEMAS["call"]},
    "list": {"json_schema": SCHEMAS["list"]},
    "person": {"json_schema": PERSON},
    "either": {"json_schema": SCHEMAS["either"]},
    "pattern": {"json_schema": {"type": "string", "pattern": '^[A-Z\\n"][\\w é]{2,9}'}},
    "date": {"regex": r"(19|20)\d{2}-(0[1-9]|1[0-2])-[0-3]\d"},
    "open": {"regex": "[A-Za-z ,.]+"},
    "accents": {"regex": "[à-ü ]{3,12}\\."},
    "choice": {"choice": ["Yes", "No", "Perhaps so", "né 😀"]},
}
HOST_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "recursive": ({"json_schema": SCHEMAS["tree"]}, "it refers to itself"),
    "open object": ({"json_schema": {"type": "object"}}, "an object may have properties that"),
    "any value": (
        {"json_schema": {"type": "object", "properties": {"x": {}}, **CLOSED}},
        "a value may be any JSON",
    ),
    "pattern": (
        {"json_schema": {"type": "string", "pattern": "^\\s+$"}},
        r"a regular expression has a class such as \w or \s",
    ),
    "allOf": ({"json_schema": {"allOf": []}}, "allOf joins 0 schemas"),
    "format": ({"json_schema": {"type": "string", "format": "uri"}}, "a string has the format uri"),
    "whitespace": (
        {"json_schema": SCHEMAS["list"], "whitespace": True},
        "whitespace is allowed between its tokens",
    ),
    "class": ({"regex": r"\w+"}, r"a regular expression has a class such as \w or \s"),
    "states": ({"regex": "[ab]*a[ab]{14}"}, "its automaton has more than 4096 states"),
    "parts": ({"regex": "(a{200}){200}b{20000}"}, "it has more than 50000 parts"),
    "grammar": ({"grammar": 'start: "a" | "b"'}, "a grammar may nest to any depth"),
    "object of the caller": (
        {"constraint": from_allowed_ids([[11], [12]])},
        "it is an object of the caller",
    ),
}


@pytest.fixture(scope="module")
def device(narrow: LoadedModel) -> Iterator[Engine]:
    with an_engine(narrow) as made:
        yield made


@pytest.fixture(scope="module")
def host(narrow: LoadedModel) -> Iterator[Engine]:
    with an_engine(narrow, automata_mib=0) as made:
        yield made


def without_place(output: Output) -> tuple[object, ...]:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason, output.error


def split_steps(engine: Engine) -> int:
    return engine.stats().split_steps


@pytest.mark.parametrize("name", FORMS)
def test_the_same_answers_as_on_the_host_without_a_wait(
    device: Engine, host: Engine, name: str
) -> None:
    before, waited = split_steps(device), split_steps(host)
    params = [
        SamplingParams(40, temperature, seed=i, logprobs=2, **FORMS[name])
        for temperature in (0.0, 1.0)
        for i in range(3)
    ]
    found, expected = (engine.generate([*QUESTIONS] * 2, params) for engine in (device, host))
    assert list(map(without_place, found)) == list(map(without_place, expected))
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    assert {one.constraint_on for one in found} == {"device"}
    assert {one.constraint_on for one in expected} == {
        "host: the engine has no memory for automata (automata_mib)"
    }
    assert split_steps(device) == before
    assert split_steps(host) > waited


@pytest.mark.parametrize("name", HOST_FORMS)
def test_what_the_device_does_not_take_says_why_it_is_on_the_host(
    device: Engine, name: str
) -> None:
    form, why = HOST_FORMS[name]
    (output,) = device.generate(["Answer."], SamplingParams(3, **form))
    assert output.error is None
    assert output.constraint_on is not None
    assert output.constraint_on.startswith(f"host: {why}")


def test_bad_words_of_several_tokens_bring_a_form_to_the_host(device: Engine) -> None:
    form = SamplingParams(12, **FORMS["open"])
    (plain,) = device.generate(QUESTIONS[:1], form)
    (found,) = device.generate(QUESTIONS[:1], replace(form, bad_words=["zebra crossings"]))
    assert found.constraint_on == "host: bad_words has texts of several tokens"
    assert found.token_ids == plain.token_ids


def test_plain_requests_have_no_constraint_anywhere(device: Engine) -> None:
    (output,) = device.generate(["Answer."], SamplingParams(2))
    assert output.constraint_on is None


def test_rows_of_all_kinds_share_a_batch_and_keep_their_tokens(
    device: Engine, host: Engine
) -> None:
    params = [
        SamplingParams(20, 1.0, seed=1, json_schema=SCHEMAS["call"]),
        SamplingParams(20, 1.0, seed=2),
        SamplingParams(20, 1.0, seed=3, json_schema=SCHEMAS["tree"]),
        SamplingParams(20, 1.0, seed=4, top_k=5, repetition_penalty=1.3, regex="[a-z ]+"),
        SamplingParams(20, 1.0, seed=5, logit_bias={11: 4.0}, regex="[a-z ,]+"),
    ]
    prompts = [QUESTIONS[i % 3] for i in range(5)]
    found, expected = device.generate(prompts, params), host.generate(prompts, params)
    assert list(map(without_place, found)) == list(map(without_place, expected))
    alone = [device.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert list(map(without_place, found)) == list(map(without_place, alone))


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 12},
        {"ignore_eos": True},
        {"stop": ["e", "xyz"]},
        {"stop_token_ids": (28,)},
        {"max_new_tokens": 1},
        {"bad_words": ("a",)},
    ],
)
def test_other_parameters_mean_the_same_on_both(
    device: Engine, host: Engine, more: dict[str, Any]
) -> None:
    params = [
        SamplingParams(**{"max_new_tokens": 24, **more}, **FORMS[form])
        for form in ("open", "call", "choice")
        for _ in QUESTIONS
    ]
    found, expected = (engine.generate([*QUESTIONS] * 3, params) for engine in (device, host))
    assert list(map(without_place, found)) == list(map(without_place, expected))
    assert {one.constraint_on for one in found} == {"device"}


def test_where_a_constraint_and_a_bias_leave_nothing_both_are_named(
    device: Engine, host: Engine
) -> None:
    """The same error on both, and others go on."""
    (token,) = device.tokenizer.encode("x", False) if device.tokenizer is not None else [0]
    params = [SamplingParams(4, regex="x", logit_bias={token: -math.inf}), SamplingParams(4)]
    found, expected = (one.generate(QUESTIONS[:2], params) for one in (device, host))
    assert list(map(without_place, found)) == list(map(without_place, expected))
    assert found[0].error is not None
    assert ": the constraint allows nothing there, or, less likely, all logits" in found[0].error
    assert found[0].error.endswith("forbid ids besides: allow more of them first")
    assert [one.finish_reason for one in found] == ["error", "length"]


def test_answers_of_one_prompt_share_one_automaton(device: Engine) -> None:
    form = SamplingParams(30, 1.0, seed=1, json_schema=PERSON)
    before = device.stats()
    outputs = device.generate([QUESTIONS[1]], form, n=12)
    after = device.stats()
    assert len({output.text for output in outputs}) > 1
    assert after.automata <= before.automata + 1
    assert after.device_constraints == before.device_constraints + 12
    until(lambda: device.stats().automata_held == 0)  # all have ended, and rows come back behind


@pytest.mark.parametrize("exact", [False, True])
def test_a_preempted_answer_goes_on_in_its_state(
    host: Engine, narrow: LoadedModel, exact: bool
) -> None:
    """Hazard 12: and its automaton's state is that of its committed tokens."""
    form = {"type": "array", "items": {"type": "string"}, "minItems": 20}
    params = [SamplingParams(40, 1.0, seed=i, json_schema=form) for i in range(3)]
    expected = host.generate(QUESTIONS, params, raw=True)
    options = {"page_size": 5, "num_pages": 15, "prefix_cache": False, "exact": exact}
    with an_engine(narrow, **options) as small:
        found = small.generate(QUESTIONS, params, raw=True)
        assert small.stats().preemptions > 0
        assert split_steps(small) == 0
    assert list(map(without_place, found)) == list(map(without_place, expected))


def test_requests_wait_for_a_place_among_the_automata(narrow: LoadedModel, host: Engine) -> None:
    """The pool of one MiB has room for one or two of these and the vocabulary."""
    forms = [{"regex": f"[a-z]{{{20 + i},{60 + i}}}"} for i in range(6)]
    params = [SamplingParams(8, 1.0, seed=i, **form) for i, form in enumerate(forms)]
    prompts = [QUESTIONS[i % 3] for i in range(6)]
    expected = host.generate(prompts, params)
    with an_engine(narrow, automata_mib=1) as small:
        found = small.generate(prompts, params)
        stats = small.stats()
    assert list(map(without_place, found)) == list(map(without_place, expected))
    assert {one.constraint_on for one in found} == {"device"}
    assert stats.device_constraints == 6
    assert 0 < stats.automata < 6


def test_an_automaton_larger_than_the_pool_is_the_hosts(narrow: LoadedModel) -> None:
    with an_engine(narrow, automata_mib=1) as small:
        (output,) = small.generate(["Answer."], SamplingParams(4, regex=".{0,100}x"))
    assert str(output.constraint_on).startswith("host: its tables take more than 0.5 MiB")
    assert output.error is None


def test_a_cancelled_request_lets_go_of_its_automaton(device: Engine) -> None:
    params = SamplingParams(30, min_tokens=30, regex="[a-z ]+")
    steps = itertools.count()
    with held_behind_its_first_step(device):
        first, second = (device.submit(prompt, params) for prompt in QUESTIONS[:2])
        device.listen(lambda output: next(steps) == 3 and first.cancel())
    assert first.result().finish_reason == "cancelled"
    assert second.result().finish_reason == "length"
    assert device.generate(["Hi."], SamplingParams(1))[0].error is None
    until(lambda: device.stats().automata_held == 0)


def test_automata_are_kept_in_a_folder(narrow: LoadedModel, device: Engine, tmp_path: Path) -> None:
    params = SamplingParams(40, 1.0, seed=3, **FORMS["call"])
    expected = device.generate(QUESTIONS[:1], params)[0]
    for _ in range(2):
        with an_engine(narrow, automata_dir=tmp_path / "automata") as engine:
            assert engine.generate(QUESTIONS[:1], params)[0].token_ids == expected.token_ids
    assert len(list((tmp_path / "automata").iterdir())) == 1


def test_the_option_is_checked(narrow: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="automata_mib"):
        an_engine(narrow, automata_mib=-1)
