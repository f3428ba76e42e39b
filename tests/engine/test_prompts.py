"""The forms of a prompt: texts, ids in lists and arrays, chats of texts and of content parts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from photon_ext.checks import Limits
from photon_ext.engine.adapters import AdapterRegistry
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.input import InputProcessor
from photon_ext.engine.request_options import RequestOptions
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.errors import RequestError
from photon_ext.models.text.chat_options import ChatOptions
from photon_ext.models.text.special_tokens import ChatText
from photon_ext.runtime.admission import Admission
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import FirstCome, Registry


class Letters:
    """A tokenizer whose ids are the code points of the text; a chat is its roles and contents."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def most_characters(self, tokens: int) -> int:
        return tokens

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        check_length: Callable[[int], None],
    ) -> ChatText:
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        check_length(len(text))
        return ChatText(text, text)

    def encode_part(self, part: ChatText) -> list[int]:
        return self.encode(part.text)


def admitted(prompt: Any, params: SamplingParams | None = None) -> Admission:
    """What a model of 200 ids is given, whose end tokens are 5 and 6."""
    processor = InputProcessor(
        Letters(),  # type: ignore[arg-type]
        (5, 6),
        Limits(vocab_size=200, max_len=500, page_size=4, pages_per_row=125, max_stop_ids=4),
        lambda prompt_tokens, max_new_tokens: max_new_tokens,
        RequestQueue(),
        FirstCome(),
        GrammarCompiler(None, 200, ()),
        AdapterRegistry(None, Registry()),
    )
    return processor.make(prompt, params, False, RequestOptions()).admission


def encoded(prompt: Any) -> tuple[int, ...]:
    return admitted(prompt).prompt_ids


def text_of(prompt: Any) -> str:
    return "".join(map(chr, encoded(prompt)))


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_numpy_arrays_of_ids(dtype: type) -> None:
    ids = encoded(np.array([5, 0, 7], dtype=dtype))
    assert ids == (5, 0, 7)
    assert {type(token) for token in ids} == {int}
    assert encoded(list(np.array([5, 0, 7], dtype=dtype))) == (5, 0, 7)
    assert encoded(np.arange(20, dtype=dtype)[2:9:3]) == (2, 5, 8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_torch_tensors_of_ids(dtype: torch.dtype) -> None:
    ids = encoded(torch.tensor([5, 0, 7], dtype=dtype))
    assert ids == (5, 0, 7)
    assert {type(token) for token in ids} == {int}
    assert encoded(torch.arange(20, dtype=dtype)[2:9:3]) == (2, 5, 8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            np.array([1.0, 2.0]),
            r"the prompt is a ndarray of float64 with shape \(2,\); give a string",
        ),
        (np.array([[1, 2]]), r"the prompt is a ndarray of int64 with shape \(1, 2\); give"),
        (np.array(5), r"the prompt is a ndarray of int64 with shape \(\); give"),
        (np.array([True]), r"the prompt is a ndarray of bool with shape \(1,\); give"),
        (np.array(["a"]), r"the prompt is a ndarray of <U1 with shape"),
        (np.array([1, None]), r"the prompt is a ndarray of object with shape"),
        (np.array([], dtype=np.int64), "the prompt is empty"),
        (np.array([5, 200]), "the prompt holds 200; token ids of this model are 0 to 199"),
        (np.array([-1]), "the prompt holds -1; token ids of this model are 0 to 199"),
        (torch.tensor([1.0]), r"the prompt is a Tensor of torch\.float32 with shape \(1,\); give"),
        (torch.tensor([[1]]), r"the prompt is a Tensor of torch\.int64 with shape \(1, 1\); give"),
        (torch.tensor([True]), r"the prompt is a Tensor of torch\.bool with shape"),
        (torch.tensor([], dtype=torch.int64), "the prompt is empty"),
        (
            torch.ones(2, dtype=torch.int64, device="meta"),
            r"the prompt's tensor cannot be read \(.*\); give",
        ),
        ([np.float64(1)], r"the prompt holds np\.float64\(1\.0\), which is no token id"),
        ([True], "the prompt holds True, which is no token id"),
        ([np.True_], r"the prompt holds np\.True_, which is no token id"),
        (b"abc", "the prompt is a bytes; give a string"),
        ({1, 2}, "the prompt is a set; give a string"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encoded(prompt)


def test_hazard_e2_a_requests_stop_tokens_are_added_to_the_models() -> None:
    params = SamplingParams(stop_token_ids=(6, 7))
    assert admitted([1], params).params.stop_token_ids == (5, 6, 7)
    assert admitted([1], replace(params, ignore_eos=True)).params.stop_token_ids == (6, 7)


LONG = "a" * 501


@pytest.mark.parametrize(
    "prompt",
    [
        LONG,
        [{"role": "", "content": LONG[2:]}],
        [{"role": "", "content": [{"type": "text", "text": LONG[2:]}]}],
        [{"role": "system", "content": "a" * 300}, {"role": "assistant", "content": "a" * 182}],
        {"prompt_embeds": [LONG[:300], (1, 2), LONG[300:]]},
        {"prompt_embeds": [5, LONG]},
    ],
)
def test_a_text_that_is_sure_to_be_too_long_is_not_encoded(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Letters, "encode")
    with pytest.raises(RequestError, match="501 characters, which are more than the 500 tokens"):
        encoded(prompt)


def test_content_parts_are_joined_as_text() -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "it?"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert text_of(chat) == "[system]Be brief.[user]Why is it?"
    assert text_of([{"role": "user", "content": tuple(parts)}]) == "[user]Why is it?"
    assert text_of([{"role": "user", "content": []}]) == "[user]"
    assert chat[1]["content"] is parts
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "x"}},
            "a content part of type 'image_url'; this engine takes 'text', 'embeds' and 'image'",
        ),
        ({"type": "input_audio", "input_audio": {}}, "a content part of type 'input_audio'"),
        ({"type": "x" * 10_000, "text": "a"}, r"a content part of type 'xxx.*\.\.\.xxx"),
        (
            {"type": "text"},
            r"the content part \{'type': 'text'\}; expected \{'type': 'text', 'text': '...'\}",
        ),
        ({"type": "text", "text": 5}, r"the content part \{'type': 'text', 'text': 5\}; expected"),
        ({"text": "a"}, r"the content part \{'text': 'a'\}; expected"),
        ("a", "the content part 'a'; expected"),
        (None, "the content part None; expected"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_their_type(part: Any, message: str) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    with pytest.raises(RequestError, match=message) as raised:
        encoded(chat)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("content", [7, b"text", 1.5, {"text"}])
def test_a_content_that_is_no_text_is_named(content: object) -> None:
    chat = [{"role": "user", "content": "see"}, {"role": "user", "content": content}]
    told = re.escape(f"the chat holds the content {content!r}; give a string, or a list of parts")
    with pytest.raises(RequestError, match=told):
        encoded(chat)


def test_other_contents_go_to_the_template_as_they_are() -> None:
    assert text_of([{"role": "assistant", "content": None, "tool_calls": []}]) == "[assistant]None"
