"""Constraints that the device keeps, on a GPU: the host's answers, without a wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance  # noqa: F401  without it these tests are left out
import pytest
import torch

from photon_ext.engine import Engine, Request
from photon_ext.models.loading.loader import load_model
from photon_ext.sampling import SamplingParams
from tests.conftest import skip_without_smollm2
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.test_device_constraints import FORMS, without_place
from tests.engine.test_embeds import hidden_of, image_of
from tests.engine.test_grammar import QUESTIONS, SCHEMAS
from tests.models.tiny import saved_tiny_model

pytestmark = pytest.mark.gpu


def an_engine(**options: Any) -> Engine:
    skip_without_smollm2()
    model = load_model("smollm2", "bfloat16", torch.device("cuda"))
    sizes = {"max_rows": 8, "max_len": 256, "buckets": (1, 8), "chunk": 64}
    return Engine.from_weights(model.config, model.weights, model.tokenizer, **{**sizes, **options})


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    """An engine that keeps forms on the device, and one that keeps them on the host."""
    with an_engine() as device, an_engine(automata_mib=0) as host:
        yield device, host


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FORMS)
def test_the_same_answers_as_on_the_host_without_a_wait(
    pair: tuple[Engine, Engine], name: str, temperature: float
) -> None:
    device, host = pair
    params = [SamplingParams(40, temperature, seed=i, **FORMS[name]) for i in range(3)]
    before = device.stats().split_steps
    found, expected = device.generate(QUESTIONS, params), host.generate(QUESTIONS, params)
    assert list(map(without_place, found)) == list(map(without_place, expected))
    assert {one.constraint_on for one in found} == {"device"}
    assert device.stats().split_steps == before


def test_automata_take_turns_in_a_small_pool() -> None:
    forms = [{"regex": f"[a-z]{{{20 + i},{60 + i}}}"} for i in range(6)]
    params = [SamplingParams(8, 1.0, seed=i, **form) for i, form in enumerate(forms)]
    prompts = [QUESTIONS[i % 3] for i in range(6)]
    with an_engine(max_rows=1, automata_mib=1) as small, an_engine(max_rows=1) as large:
        found, expected = small.generate(prompts, params), large.generate(prompts, params)
        assert 0 < small.stats().automata < 6
    assert list(map(without_place, found)) == list(map(without_place, expected))


def test_eager_steps_have_them_too() -> None:
    params = SamplingParams(40, json_schema=SCHEMAS["call"])
    with an_engine(graph=False) as eager, an_engine() as captured:
        found, expected = (one.generate(QUESTIONS, params) for one in (eager, captured))
    assert list(map(without_place, found)) == list(map(without_place, expected))


def test_requests_may_be_kept_longer_than_their_engine(tmp_path: Path) -> None:
    """And freed while another one serves: what was sent for them lies in pinned memory."""
    image = image_of(hidden_of(saved_tiny_model("llama-plain", tmp_path)), 20)
    loaded = load_model(tmp_path, torch.float32, torch.device("cuda"))
    sizes = {"max_rows": 2, "max_len": 64, "embeds_tokens": 20, "automata_mib": 1}
    kept: list[Request] = []
    answers = set()
    for _ in range(4):
        parts = loaded.config, loaded.weights, byte_tokenizer()
        with Engine.from_weights(*parts, **sizes) as engine:
            kept = [
                engine.submit({"prompt_embeds": image}, SamplingParams(6, ignore_eos=True)),
                engine.submit("AB", SamplingParams(choice=("first", "second"))),
            ]
            shown, chosen = (request.result(60) for request in kept)
        assert chosen.constraint_on == "device"
        answers.add((shown.token_ids, chosen.text))
    assert len(answers) == 1
