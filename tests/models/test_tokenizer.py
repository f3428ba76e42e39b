"""Tokenizer and chat templates against transformers, from the bundled GGUF file and from
directories.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.chat_template_utils import render_jinja_template

from photon_ext.errors import ModelError, RequestError
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.loader import LoadedModel, resolve_model
from photon_ext.models.text.chat_template import ChatTemplate
from photon_ext.models.text.gguf_tokenizer import _PRE_TOKENIZERS, _pre_tokenizer
from photon_ext.models.text.tokenizer import Tokenizer
from tests.models.tiny import tiny_model
from tests.models.tiny_gguf import write_tiny_gguf

CHAT_TEMPLATE = "chat_template.jinja"
TEXTS = [
    "",
    "Hello, world! It's 12345 o'clock; I'll don't.",
    "  two spaces\n\n\ttab \r\n end  ",
    "naïve café 你好世界 🙂👩‍👩‍👧 русский العربية",
    "def f(x):\n    return x ** 2  # squares\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
]
MESSAGES = [
    {"role": "user", "content": "Why is the sky <blue> & 'wide'?"},
    {"role": "assistant", "content": "Scattering."},
    {"role": "user", "content": "And at dusk?"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: LoadedModel) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


@pytest.fixture(scope="module")
def smollm2_reference() -> PreTrainedTokenizerFast:
    path = resolve_model("smollm2")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(
    text: str, tokenizer: Tokenizer, smollm2_reference: PreTrainedTokenizerFast
) -> None:
    ids = tokenizer.encode(text)
    assert ids == smollm2_reference(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == smollm2_reference.decode(ids, skip_special_tokens=True)


def test_smollm2_cuts_digits_before_words_as_its_original_does(tokenizer: Tokenizer) -> None:
    """The original isolates digits first, so two blanks before a digit stay one token;
    transformers' GGUF reader does not.
    """
    assert tokenizer.encode("a  12") == [*map(tokenizer.token_id, ("a", "ĠĠ", "1", "2"))]


def test_smollm2_chat_equals_transformers(
    tokenizer: Tokenizer, smollm2_reference: PreTrainedTokenizerFast
) -> None:
    for prompted in (False, True):
        expected = smollm2_reference.apply_chat_template(
            MESSAGES, add_generation_prompt=prompted, tokenize=False
        )
        assert tokenizer.chat_template is not None
        assert tokenizer.chat_template.render(MESSAGES, prompted) == expected
        ids = tokenizer.encode_chat(MESSAGES, prompted)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert tokenizer.eos_id == tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.encode_chat(MESSAGES)[0] == tokenizer.bos_id == 1
    assert tokenizer.vocab_size == 49152


def test_smollm2_chat_has_the_ids_of_transformers_beside_pipes_and_tags(
    tokenizer: Tokenizer, smollm2_reference: PreTrainedTokenizerFast
) -> None:
    contents = "a | b || c <div>", "<think>|</think> | x | y |", "<tool_call>{}</tool_call>"
    messages = [{"role": "user", "content": content} for content in contents]
    text = smollm2_reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.chat_text(messages).text == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)


@given(text=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], max_codepoint=0x1FFFF)))
def test_any_text_comes_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_text_of_more_characters_is_of_more_tokens(tokenizer: Tokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.decode([i])))
    text = 16 * tokenizer.decode([longest])
    most = tokenizer.most_characters(16)
    assert most is not None
    assert len(tokenizer.encode(text)) <= 16
    assert len(text) <= most < 2 * len(text)


def test_a_surrogate_is_counted_from_the_begin_of_its_message(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800, at character 2; give"):
        tokenizer.encode_chat([{"role": "user", "content": "ab\ud800"}])


@pytest.mark.parametrize("message", [{"role": "user"}, "hello", None], ids=str)
def test_a_prompt_with_a_bad_chat_is_refused(tokenizer: Tokenizer, message: Any) -> None:
    with pytest.raises(RequestError, match=r"refuses these 1 messages .*expected a list such as"):
        tokenizer.encode_chat([message])


@pytest.mark.parametrize("messages", [[], None], ids=str)
def test_a_chat_without_messages_is_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="a conversation has no messages"):
        tokenizer.encode_chat(messages)


NO_LISTS = [5, 0, object(), "hello", b"hello", MESSAGES[0], set()]


@pytest.mark.parametrize(
    "messages",
    [iter(MESSAGES), (message for message in MESSAGES), *NO_LISTS],
    ids=lambda m: type(m).__name__,
)
def test_a_chat_that_is_no_list_is_refused_and_not_consumed(
    tokenizer: Tokenizer, messages: Any
) -> None:
    told = rf"is a {type(messages).__name__}; expected a list of messages such as \[\{{'role'"
    with pytest.raises(RequestError, match=f"the conversation {told}"):
        tokenizer.encode_chat(messages)
    assert not isinstance(messages, Iterator) or list(messages) == MESSAGES


def test_a_chat_may_be_a_tuple(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_chat(tuple(MESSAGES)) == tokenizer.encode_chat(MESSAGES)


def saved_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A small byte-level BPE with special tokens and a begin-of-text rule, written as a Hugging
    Face directory.
    """
    from tokenizers.processors import TemplateProcessing

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["the cat sat on the mat, then it sat on the hat"] * 4, trainer)
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    reference.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m | "
        "tojson }}{{ eos_token }}{% endfor %}"
    )
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("template_in", ["file", "config", "named"])
def test_directory_equals_transformers(template_in: str, tmp_path: Path) -> None:
    reference = saved_tokenizer(tmp_path)
    config_path, template_path = tmp_path / "tokenizer_config.json", tmp_path / CHAT_TEMPLATE
    assert template_path.exists()
    if template_in != "file":
        template: object = template_path.read_text()
        if template_in == "named":
            named = {"tool_use": "no", "default": template}
            template = [{"name": name, "template": each} for name, each in named.items()]
        config = json.loads(config_path.read_text())
        config_path.write_text(json.dumps({**config, "chat_template": template}))
        template_path.unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        for begun in (True, False):
            expected = reference(text, add_special_tokens=begun).input_ids
            assert tokenizer.encode(text, begun) == expected
    assert tokenizer.encode_chat(MESSAGES) == reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_hazard_e1_no_prompt_begins_with_two_begin_of_text_tokens(tmp_path: Path) -> None:
    reference = saved_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    chat = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids[:2].count(0) == 1
    assert tokenizer.encode("the cat")[:2].count(0) == 1
    assert tokenizer.encode(chat) == ids, "a text that a template has made"
    assert tokenizer.encode("<s><s>the", add_special_tokens=False)[:2] == [0, 0]


def test_what_a_trainer_left_in_the_file_neither_cuts_nor_pads_prompts(tmp_path: Path) -> None:
    trained = saved_tokenizer(tmp_path)
    trained.pad_token = "</s>"
    trained(["the cat sat on the mat"], truncation=True, max_length=4, padding="max_length")
    trained.save_pretrained(tmp_path)
    left = json.loads((tmp_path / "tokenizer.json").read_text())
    assert left["truncation"] is not None
    assert left["padding"] is not None
    tokenizer = Tokenizer.from_directory(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat sat on the mat, then it sat on the hat", "a"):
        assert tokenizer.encode(text) == reference(text).input_ids
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_directory_without_template_takes_no_messages(tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    (tmp_path / CHAT_TEMPLATE).unlink()
    told = r"tokenizer\.json has no chat template; send a plain prompt"
    with pytest.raises(RequestError, match=told):
        Tokenizer.from_directory(tmp_path).encode_chat(MESSAGES)


def test_directories_that_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file; copy"):
        Tokenizer.from_directory(tmp_path)
    saved_tokenizer(tmp_path)
    (tmp_path / CHAT_TEMPLATE).write_text("{% for %}")
    with pytest.raises(ModelError, match="chat template does not compile"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer that"):
        Tokenizer.from_directory(tmp_path)


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / CHAT_TEMPLATE).write_text(attack)
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.from_directory(tmp_path).encode_chat(MESSAGES)


def rendered(template: str, messages: Any = MESSAGES) -> str:
    return ChatTemplate(template, {}, "some/file").render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools is not none %}TOOLS{% endif %}{{ messages[0].content }}",
        "{{ tools is defined }}{{ documents is none }}",
        "{% set n = 1 %}{% for m in messages %}{% generation %}{% set n = 2 %}{{ m.content }}{{ n "
        "}}{% endgeneration %}{{ n }}{% endfor %}",
        "{{ {'é': 1, 'a': '<'} | tojson }}",
        "{{ {'é': 1, 'a': '<'} | tojson(true) }}",
        "{{ {'é': 1, 'a': 2} | tojson(ensure_ascii=true, indent=4, sort_keys=true) }}",
        "{{ {'é': 1, 'a': 2} | tojson(ensure_ascii=false, separators=(',', ':'), "
        "sort_keys=true) }}",
    ],
)
def test_templates_find_what_transformers_gives_them(template: str) -> None:
    expected = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True
    )[0]
    assert [rendered(template)] == expected


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"),
        ("{{ '%d' % messages[0].content }}", "TypeError: %d format"),
        ("{{ messages[0].content.index('zz') }}", "ValueError: substring not found"),
        ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
        (
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
            "RecursionError: maximum recursion depth",
        ),
        ("{{ messages[0].content.foo.bar }}", "'str object' has no attribute 'foo'"),
        ("{{ 5 | dictsort }}", "AttributeError: 'int' object has no attribute 'items'"),
        ("{{ 'text'.encode('nothing') }}", "LookupError: unknown encoding: nothing"),
    ],
)
def test_a_template_that_fails_on_any_messages_is_told_from_bad_messages(
    template: str, error: str
) -> None:
    with pytest.raises(RequestError) as raised:
        rendered(template)
    assert str(raised.value).startswith(f"some/file: the chat template fails ({error}")
    assert str(raised.value).endswith(
        "), on a plain user message too; repair it, or send a string and raw=True instead of "
        "messages"
    )


@pytest.mark.parametrize(
    ("template", "content", "error"),
    [
        ("{{ 10 // (messages[0].content | length) }}", "", "ZeroDivisionError: integer division"),
        ("{{ messages[0].content.strip() }}", None, "'None' has no attribute 'strip'"),
        ("{{ messages[0].content | tojson }}", object(), "TypeError: Object of type object is no"),
        ("{{ raise_exception('never') }}", "x", "never"),
        ("{{ raise_exception('only systems') }}{{ 1 // 0 }}", "x", "only systems"),
    ],
)
def test_messages_on_which_a_sound_template_fails_are_refused(
    template: str, content: Any, error: str
) -> None:
    with pytest.raises(RequestError) as raised:
        rendered(template, [{"role": "tool", "content": content}])
    assert str(raised.value).startswith(f"the chat template refuses these 1 messages ({error}")
    assert str(raised.value).endswith(
        "); expected a list such as [{'role': 'user', 'content': 'text'}]"
    )


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("qwen2", PRETOKENIZE_REGEX), ("llama-bpe", TikTokenConverter(vocab_file="unused").pattern)],
)
@given(text=st.text(alphabet=st.sampled_from("aZé你 \t\r\n'stllS01234!?.")))
def test_gguf_pre_tokenizers_cut_like_the_originals(pre: str, pattern: str, text: str) -> None:
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    original = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    assert _pre_tokenizer(_PRE_TOKENIZERS[pre]).pre_tokenize_str(text) == original.pre_tokenize_str(
        text
    )


def test_gguf_begin_of_text_and_whole_word_rules(tmp_path: Path) -> None:
    """Llama 3 files begin texts unless told otherwise, and take a piece that is a token of its
    own whole.
    """
    model = tiny_model("llama-plain")
    for name, fields in {"on": {}, "off": {"tokenizer.ggml.add_bos_token": False}}.items():
        metadata = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0, **fields}
        write_tiny_gguf(model, tmp_path / f"{name}.gguf", metadata)
    on, off = (Tokenizer.from_gguf(GgufFile(tmp_path / f"{name}.gguf")) for name in ("on", "off"))
    a, ab, blank_ab = off.token_id("a"), off.token_id("ab"), off.token_id("Ġab")
    assert off.encode("ab ab<|eos|>a") == [ab, blank_ab, 1, a]
    assert on.encode("ab") == [0, ab]
    assert on.encode("ab", add_special_tokens=False) == [ab]
    assert on.decode([0, ab, blank_ab, 1]) == "ab ab"


def test_ids_without_token() -> None:
    """Between tokens, and behind the last one, which was added."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "d": 4}, []))
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, {}, None, "a test")
    assert tokenizer.token_id("<end>") == 3
    assert tokenizer.ids_without_token(7) == [2, 5, 6]
