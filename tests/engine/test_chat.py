"""`Engine.chat`: one conversation in, one answer out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from photon_ext import Engine, RequestError, SamplingParams
from tests.cli.command import save_with_template

PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("chat")
    save_with_template(folder)
    with Engine.from_pretrained(folder, device="cpu", max_rows=2, max_len=64) as made:
        yield made


def test_the_answer_is_that_of_the_templates_text(engine: Engine) -> None:
    messages = [
        {"role": "system", "content": "w9"},
        {"role": "user", "content": [{"type": "text", "text": "w5 w6"}]},
    ]
    output = engine.chat(messages, PARAMS)
    (same,) = engine.generate(["w1 w9 w2 w5 w6"], PARAMS, raw=True)
    assert (output.text, output.token_ids) == (same.text, same.token_ids)
    assert (output.finish_reason, output.prompt_tokens) == ("length", 5)


@pytest.mark.parametrize("messages", ["Hello", [], None, ["Hello"], [[{"role": "user"}]]])
def test_what_is_no_conversation_is_refused(engine: Engine, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages is .*; give a list of chat messages"):
        engine.chat(messages)
    assert engine.chat([{"role": "user", "content": "w5"}], PARAMS).finish_reason == "length"


def test_a_message_without_a_role_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="each message needs a 'role'"):
        engine.chat([{"content": "w5"}])
