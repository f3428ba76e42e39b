"""`Engine.chat`: one conversation in, one answer out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from photon_ext import ConfigError, Engine, RequestError, SamplingParams
from tests.cli.command import save_with_template

PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("chat")
    save_with_template(folder)
    words = Backend.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens(["w2"])
    words.save(str(folder / "tokenizer.json"))
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


def test_hazard_e3_a_request_says_whether_text_may_be_a_control_token(engine: Engine) -> None:
    messages = [{"role": "user", "content": "w5 w2 w6"}]
    (taken,) = engine.generate([messages], PARAMS, special_tokens_in_messages=True)
    (raw,) = engine.generate(["w2 w5 w2 w6"], PARAMS, raw=True)
    assert (taken.prompt_tokens, taken.token_ids) == (raw.prompt_tokens, raw.token_ids)
    (spelled,) = engine.generate(["w2 w5 w0 w0 w6"], PARAMS, raw=True)
    for output in (engine.chat(messages, PARAMS), engine.submit("w5 w2 w6", PARAMS).result()):
        assert (output.prompt_tokens, output.token_ids) == (5, spelled.token_ids)


def test_chat_options_reach_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    output = engine.chat(messages, PARAMS, continue_final_message=True)
    (same,) = engine.generate(["w2 w5 w3 w6"], PARAMS, raw=True)
    assert (output.prompt_tokens, output.token_ids) == (same.prompt_tokens, same.token_ids)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("w5", {"continue_final_message": True}, "the prompt is a string; give messages"),
        ([5], {"continue_final_message": True}, "^continue_final_message is given with a prompt"),
        ([5], {"chat_template_kwargs": {"a": 1}}, r"^chat_template_kwargs \{'a': 1\} is given wi"),
        ("w5", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs has 'a', which the chat"),
        ("w5", {"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]; give a dict"),
        ("w5", {"special_tokens_in_messages": 1}, "special_tokens_in_messages is 1; "),
    ],
)
def test_options_that_no_template_takes_are_refused(
    engine: Engine, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, ConfigError), match=message):
        engine.submit(prompt, PARAMS, **options)
