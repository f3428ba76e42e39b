"""Damaged model files: whatever a key or a file holds, loading works or raises a ModelError that
names it; nothing else ever comes out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from photon_ext.errors import ModelError
from photon_ext.models.decoder import Decoder
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.loader import load_model
from photon_ext.models.loading.shards import INDEX_FILE, SINGLE_FILE
from tests.models.tiny import LLAMA3_ROPE, VOCAB, saved_tiny_model, tiny_model
from tests.models.tiny_gguf import write_tiny_gguf

JUNK: list[Any] = [None, 0, -1, -64, 10**15, 10**400, 1.5, float("inf"), float("nan"), True]
JUNK += ["", "x", "64", [], [{}], ["x"], {}, {"x": 1}]
CONFIG_KEYS = [
    *("architectures", "attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_act"),
    *("hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "mlp_bias"),
    *("model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("partial_rotary_factor", "quantization_config", "rms_norm_eps", "rope_parameters"),
    *("rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "vocab_size"),
]
GGUF_KEYS = [
    *("general.architecture", "general.file_type", "llama.attention.head_count"),
    *("llama.attention.head_count_kv", "llama.attention.key_length"),
    *("llama.attention.layer_norm_rms_epsilon", "llama.attention.value_length"),
    *("llama.block_count", "llama.context_length", "llama.embedding_length", "llama.expert_count"),
    *("llama.feed_forward_length", "llama.rope.dimension_count", "llama.rope.freq_base"),
    *("llama.rope.scale_linear", "llama.rope.scaling.factor", "llama.rope.scaling.type"),
    *("llama.vocab_size", "tokenizer.chat_template", "tokenizer.ggml.add_bos_token"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.token_type"),
    "tokenizer.ggml.tokens",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with Llama 3 scaling, a tokenizer of words and the small files around it."""
    path = tmp_path_factory.mktemp("tiny")
    saved_tiny_model("llama-7-1-96-scaled", path)
    Backend(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(
        str(path / "tokenizer.json")
    )
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w2", "chat_template": "{{ messages }}"})
    )
    return path


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**config, **values}))


def alone(folder: Path, file: str) -> Path:
    """The path of `file`; an index is looked at only where there is no single file."""
    if file == INDEX_FILE:
        (folder / SINGLE_FILE).unlink()
    return folder / file


def load_or_refuse(model: Path, what: object) -> None:
    """Loads the model and makes its decoder; a ModelError that names the model is fine too."""
    message = None
    try:
        loaded = load_model(model)
        Decoder(loaded.config, loaded.weights, 4, 4, 1, 16, 2)
    except ModelError as error:
        message = str(error)
    except BaseException as error:
        raise AssertionError(f"{what} raises a raw {type(error).__name__}") from error
    assert message is None or model.name in message, what


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_any_value_of_a_config_key(key: str, broken: Path) -> None:
    for value in JUNK:
        change(broken / "config.json", **{key: value})
        load_or_refuse(broken, (key, value))


@pytest.mark.parametrize("key", sorted(LLAMA3_ROPE))
def test_any_value_of_a_rope_parameter(key: str, broken: Path) -> None:
    for value in JUNK:
        change(broken / "config.json", rope_parameters={**LLAMA3_ROPE, key: value})
        load_or_refuse(broken, (key, value))


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "chat_template"),
        ("tokenizer_config.json", "eos_token"),
        ("tokenizer.json", "model"),
        (INDEX_FILE, "weight_map"),
    ],
)
def test_any_value_in_the_files_beside_it(file: str, key: str, broken: Path) -> None:
    alone(broken, file)
    if not (broken / file).exists():
        (broken / file).write_text("{}")
    for value in [
        *JUNK,
        {"a": []},
        {"a": 5},
        [{"name": "default"}],
        [{"name": "default", "template": 5}],
    ]:
        change(broken / file, **{key: value})
        load_or_refuse(broken, (file, key, value))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"null", b"[1]", b"{", b"[" * 100_000, b'{"a": \xff}']
)
@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        INDEX_FILE,
    ],
)
def test_any_content_of_a_file(file: str, content: bytes, broken: Path) -> None:
    alone(broken, file)
    (broken / file).unlink(missing_ok=True)
    (broken / file).write_bytes(content)
    load_or_refuse(broken, (file, content[:10]))


@pytest.mark.parametrize("key", GGUF_KEYS)
def test_any_value_of_gguf_metadata(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(
        tiny_model("llama-plain"),
        path,
        {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True},
    )
    fields = dict(GgufFile(path).fields)
    for value in JUNK:
        replaced = property(
            lambda self, value=value: {**fields, key: value}, lambda self, read: None
        )
        monkeypatch.setattr(GgufFile, "fields", replaced, raising=False)
        load_or_refuse(path, (key, value))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected an integer from 1"),
        ({"hidden_size": -49}, "hidden_size is -49, expected an integer from 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, expected a finite number above 0"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "factor": None}},
            r"rope_parameters\.factor is None, expected a finite number",
        ),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
            r"low_freq_factor is 4\.0, expected a number below high_freq_factor, which is 4\.0",
        ),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', expected a token id or a list of them"),
        ({"eos_token_id": VOCAB}, f"end token {VOCAB} is not in the vocabulary of {VOCAB}"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq', expected an object"),
        ({"layer_types": 5}, "layer_types is 5, expected a list"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or fa"),
    ],
)
def test_a_damaged_config_is_named_with_what_was_expected(
    values: dict[str, Any], message: str, broken: Path
) -> None:
    change(broken / "config.json", **values)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        load_model(broken)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: not a readable UTF-8 file"),
        (
            INDEX_FILE,
            b'{"weight_map": {"a": ["b"]}}',
            r"index\.json: has no 'weight_map' object that names a shard for each tensor",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default"}]}',
            r"tokenizer_config\.json: chat_template is \[\{'name': 'default'\}\], expected a text, "
            "or a list of objects",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": "x"}',
            r"generation_config\.json: eos_token_id is 'x'",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": [0, 999]}',
            rf"/generation_config\.json: end token 999 is not in the vocabulary of {VOCAB}",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(
    file: str, content: bytes, message: str, broken: Path
) -> None:
    alone(broken, file).unlink(missing_ok=True)
    (broken / file).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(broken)


def test_files_that_contradict_each_other_are_named(broken: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"w2": 999, "w0": 0}, "unk_token": "w0"}
    change(broken / "tokenizer.json", model=words)
    told = rf"/tokenizer\.json: end token 999 is not in the vocabulary of {VOCAB}"
    with pytest.raises(ModelError, match=told):
        load_model(broken)
    change(broken / "config.json", vocab_size=2**24)
    told = rf"embed_tokens\.weight has shape \[{VOCAB}, 49\], config\.json asks for \[{2**24}, 49\]"
    with pytest.raises(ModelError, match=told):
        load_model(broken)


def test_damage_that_nobody_foresaw_is_named_as_well(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("photon_ext.models.loading.model_files.hf_config", fail)
    with pytest.raises(
        ModelError, match=rf"{broken.name}: cannot be read \(KeyError: 'surprise'\)"
    ) as raised:
        load_model(broken)
    assert isinstance(raised.value.__cause__, KeyError)
