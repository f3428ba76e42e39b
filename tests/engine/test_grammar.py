"""Answers with a form, as users see them: SmolLM2 on the CPU. Where the device can keep the form,
the same holds as where the host does.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema
import llguidance  # noqa: F401  without it these tests are left out
import pytest

from photon_ext.engine import Engine
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.output import Output
from photon_ext.errors import RequestError
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.sampling import SamplingParams, from_allowed_ids, mask_threads
from photon_ext.sampling.mask_threads import MaskThreads
from tests.engine.test_engine_models import held_behind_its_first_step

CITY = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "call": {
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                "type": "object",
                "properties": {"city": CITY, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 2,
        "maxItems": 4,
    },
    "either": {
        "anyOf": [
            {"type": "boolean"},
            {"type": "object", "properties": {"at": {"type": "string", "format": "date"}},
             "required": ["at"], "additionalProperties": False},
        ]
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "minimum": 0, "maximum": 99},
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["id", "left"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}  # fmt: skip
QUESTIONS = ("What is the weather in Paris?", "Give an example.", "Answer in JSON.")


def an_engine(model: LoadedModel, **options: Any) -> Engine:
    sizes = {"max_rows": 6, "max_len": 256, "chunk": 64, "buckets": (1, 6)}
    return Engine.from_weights(model.config, model.weights, model.tokenizer, **{**sizes, **options})


@pytest.fixture(scope="module", params=[16, 0], ids=["device", "host"])
def engine(narrow: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with an_engine(narrow, automata_mib=request.param) as made:
        yield made


def ends_by_its_form(output: Output) -> bool:
    """Whether it is complete; else it was cut by its cap."""
    assert output.error is None
    assert output.finish_reason in ("stop", "length")
    return output.finish_reason == "stop"


def check_prefix(engine: Engine, output: Output, params: SamplingParams) -> None:
    """What was cut is the beginning of a text of its form."""
    assert engine.tokenizer is not None
    assert params.answer_grammar is not None
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, [engine.tokenizer.eos_id])
    constraint = compiler.start(params.answer_grammar)
    for token in output.token_ids:
        assert not constraint.finished
        constraint.advance(token)


def test_a_choice_is_one_of_its_texts(engine: Engine) -> None:
    choice = ["Yes", "No", "Perhaps so"]
    params = [
        SamplingParams(choice=choice, temperature=heat, seed=i)
        for i, heat in enumerate((0.0, 1.0, 5.0, 5.0))
    ]
    outputs = engine.generate(["Is the sky blue?"] * 4, params)
    assert {output.text for output in outputs} <= {*choice}
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert {output.stop_reason for output in outputs} == {"constraint"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_regular_expression_matches_the_answer(engine: Engine, temperature: float) -> None:
    regex = r"(19|20)\d{2}-(0[1-9]|1[0-2])-[0-3]\d"
    params = SamplingParams(regex=regex, temperature=temperature, seed=1)
    (output,) = engine.generate(["When did men land on the moon?"], params)
    assert re.fullmatch(regex, output.text)
    assert output.stop_reason == "constraint"


def test_an_answer_that_may_go_on_ends_with_the_models_end_token(engine: Engine) -> None:
    bias = {engine.tokenizer.eos_id: 100.0}  # wherever it may stand
    params = SamplingParams(regex=r"[A-Za-z ,.]+", max_new_tokens=60, logit_bias=bias)
    (output,) = engine.generate(["Say hello."], params)
    assert output.finish_reason == "stop"
    assert output.stop_reason == engine.tokenizer.eos_id
    assert re.fullmatch(r"[A-Za-z ,.]+", output.text)


def test_a_grammar_is_followed(engine: Engine) -> None:
    text = 'start: NUMBER "+" NUMBER "=" NUMBER\nNUMBER: /[1-9][0-9]?/'
    (output,) = engine.generate(["Add two numbers."], SamplingParams(grammar=text))
    assert re.fullmatch(r"[1-9]\d?\+[1-9]\d?=[1-9]\d?", output.text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_parse_and_validate(engine: Engine, name: str) -> None:
    params = [
        SamplingParams(
            max_new_tokens=50,
            json_schema=SCHEMAS[name],
            temperature=temperature,
            seed=seed,
            whitespace=seed == 2,
        )
        for seed, temperature in enumerate((0.0, 1.0, 1.0))
    ]
    outputs = engine.generate(QUESTIONS, params)
    for output in filter(ends_by_its_form, outputs):
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])
    # a tree may grow for ever
    assert any(map(ends_by_its_form, outputs)) or name == "tree"
    for output, own in zip(outputs, params, strict=True):
        if output.finish_reason == "length":
            check_prefix(engine, output, own)


def test_plain_rows_beside_them_keep_their_tokens(engine: Engine) -> None:
    prompts = ["Why is the sky blue?", "Count to ten.", "A poem on rain."]
    plain = [SamplingParams(12, heat, seed=4) for heat in (0.0, 1.0, 0.7)]
    alone = [engine.generate([prompt], own)[0] for prompt, own in zip(prompts, plain, strict=True)]
    formed = [SamplingParams(12, 1.0, seed=i, json_schema=SCHEMAS["call"]) for i in range(3)]
    mixed = engine.generate([*prompts, *QUESTIONS], [*plain, *formed])
    assert [output.token_ids for output in mixed[:3]] == [output.token_ids for output in alone]
    again = engine.generate(QUESTIONS, formed)
    assert [output.token_ids for output in mixed[3:]] == [output.token_ids for output in again]


def test_params_serve_many_requests_and_the_same_seed_gives_the_same(engine: Engine) -> None:
    params = SamplingParams(30, 1.0, seed=9, json_schema=SCHEMAS["list"])
    outputs = engine.generate([QUESTIONS[1]] * 4, params)
    assert len({output.text for output in outputs}) == 1
    jsonschema.validate(json.loads(outputs[0].text), SCHEMAS["list"])


def test_rows_whose_masks_are_filled_together_keep_their_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row has a grammar that others have, too, one a constraint of its own, one none. Those
    with whitespace are the host's everywhere.
    """
    forms = [SCHEMAS[name] for name in ("call", "list", "either", "call")]
    params = [
        *(
            SamplingParams(16, 1.0, seed=i, json_schema=form, whitespace=True)
            for i, form in enumerate(forms)
        ),
        SamplingParams(16, 1.0, seed=7, constraint=from_allowed_ids(range(300, 400))),
        SamplingParams(16, 1.0, seed=8),
    ]
    alone = [engine.generate([QUESTIONS[0]], own)[0] for own in params]
    filled: list[int] = []
    fill = MaskThreads.fill

    def counted(self: MaskThreads, constraints: Iterable[Any]) -> None:
        asked = list(constraints)
        fill(self, asked)
        filled.append(sum(getattr(one, "filled", None) is not None for one in asked))

    monkeypatch.setattr(MaskThreads, "fill", counted)
    monkeypatch.setattr(mask_threads, "LEAST_TOGETHER", 4)
    monkeypatch.setattr(engine._loop._masks, "enabled", True)
    together = engine.generate([QUESTIONS[0]] * 6, params)
    assert max(filled) == 4
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_a_stop_string_and_a_cap_cut_the_answer(engine: Engine) -> None:
    asked = {"json_schema": SCHEMAS["call"]}
    prompt = QUESTIONS[0]
    (whole,) = engine.generate([prompt], SamplingParams(80, **asked))
    stopped, capped = engine.generate(
        [prompt] * 2, [SamplingParams(80, stop='"arguments"', **asked), SamplingParams(5, **asked)]
    )
    assert stopped.stop_reason == '"arguments"'
    assert stopped.text == whole.text.partition('"arguments"')[0]
    assert capped.stop_reason == "max_new_tokens"
    assert whole.text.startswith(capped.text)


def test_the_same_answers_at_depth_1_and_2(engine: Engine, narrow: LoadedModel) -> None:
    params = [SamplingParams(20, 1.0, seed=i, json_schema=SCHEMAS["call"]) for i in range(3)]
    with an_engine(narrow, depth=1) as blocking:
        expected = blocking.generate(QUESTIONS, params)
    found = engine.generate(QUESTIONS, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_a_preempted_answer_goes_on_where_it_was(engine: Engine, narrow: LoadedModel) -> None:
    form = {"type": "array", "items": {"type": "string"}, "minItems": 20}
    params = [SamplingParams(40, 1.0, seed=i, json_schema=form) for i in range(3)]
    expected = engine.generate(QUESTIONS, params, raw=True)
    with an_engine(narrow, page_size=5, num_pages=15, prefix_cache=False) as small:
        found = small.generate(QUESTIONS, params, raw=True)
        assert small.stats().preemptions > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.error for one in found] == [None] * 3


def test_a_cancelled_answer_leaves_the_others_alone(engine: Engine) -> None:
    params = SamplingParams(40, json_schema=SCHEMAS["call"])
    steps = itertools.count()
    with held_behind_its_first_step(engine):
        first, second = (engine.submit(prompt, params) for prompt in QUESTIONS[:2])
        engine.listen(lambda output: next(steps) == 3 and first.cancel())
    assert first.result().finish_reason == "cancelled"
    jsonschema.validate(json.loads(second.result().text), SCHEMAS["call"])


def test_what_is_refused_at_submit_hurts_nobody(engine: Engine) -> None:
    plain = engine.submit("Count to ten.", SamplingParams(20))
    told = r"^prompt 1: json_schema '.*' is refused: Unimplemented keys: ..not..; change what is"
    with pytest.raises(RequestError, match=told):
        engine.generate(QUESTIONS[:2], [SamplingParams(4), SamplingParams(json_schema={"not": {}})])
    assert plain.result().finish_reason in ("stop", "length")


def test_threads_submit_at_once(engine: Engine) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        params = SamplingParams(choice=[f"number {number}", f"letter {number}"])
        answers[number] = engine.submit("Choose.", params).result().text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(text in (f"number {i}", f"letter {i}") for i, text in answers.items())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json_schema": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
        ({"json_schema": {"enum": ["a<|im_start|>b"]}}, '"a<|im_start|>b"'),
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"regex": r"<\|endoftext\|>x"}, "<|endoftext|>x"),
        ({"grammar": 'start: "a<|im_end|>" /<[|]im_start[|]>/'}, "a<|im_end|><|im_start|>"),
        ({"grammar": 'root ::= "a<|im_end|>b"'}, "a<|im_end|>b"),
    ],
)
def test_text_that_spells_a_special_token_is_text(
    engine: Engine, form: dict[str, Any], text: str
) -> None:
    """It became that token where it was the only text to follow, and an end token ended it."""
    (output,) = engine.generate(["Go on."], SamplingParams(30, **form))
    assert (output.text, output.finish_reason, output.error) == (text, "stop", None)


def test_a_grammar_may_name_special_tokens(engine: Engine, narrow: LoadedModel) -> None:
    assert narrow.tokenizer is not None
    token = narrow.tokenizer.token_id("<|im_start|>")
    form = 'start: "a" <|im_start|> "b"  // <|im_end|>'
    (output,) = engine.generate(["Go on."], SamplingParams(9, grammar=form))
    assert (output.text, output.token_ids[1]) == ("ab", token)
    with pytest.raises(RequestError, match=r'unknown special token: "<\|no\|>"; change what is na'):
        engine.submit("Go on.", SamplingParams(grammar='start: "a" <|no|>'))
