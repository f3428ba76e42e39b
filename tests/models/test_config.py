"""ModelConfig and the rope tables against transformers and published figures."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from photon_ext.errors import ModelError
from photon_ext.models.config import Family, ModelConfig, RopeScaling, RopeScalingKind
from photon_ext.models.loading.gguf_config import metadata_config
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.rope import identity_tables, inverse_frequencies, rope_tables
from photon_ext.models.shapes import NAMED_SHAPES
from photon_ext.models.weights import empty_weights
from tests.models.tiny import LLAMA3_ROPE, TINY, tiny_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GGUF = {
    "general.architecture": "qwen3",
    "qwen3.embedding_length": 64,
    "qwen3.block_count": 2,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 32,
    "qwen3.feed_forward_length": 96,
    "qwen3.context_length": 512,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.tokens": ["a"] * 70,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.eot_token_id": 6,
}


@pytest.mark.parametrize(
    ("name", "gigabytes", "kib_per_token"),
    [
        ("qwen3-0.6b", 1.192, 112),
        ("llama-3.2-1b", 2.472, 32),
        ("qwen3-4b", 8.045, 144),
        ("qwen3-8b", 15.14, 144),
        ("qwen2.5-0.5b", 0.988, 12),
        ("mistral-7b", 14.23, 128),
        ("granite-3.1-2b", 5.067, 80),
        ("smollm3-3b", 6.150, 72),
        ("phi-4-mini", 7.672, 128),
    ],
)
def test_named_shapes_read_the_published_bytes(
    name: str, gigabytes: float, kib_per_token: int
) -> None:
    config = NAMED_SHAPES[name]
    weights = empty_weights(config, torch.bfloat16, "meta")
    read = weights.nbytes - (0 if config.tied_embeddings else weights.embedding.data.nbytes)
    assert read / 1e9 == pytest.approx(gigabytes, rel=5e-4)
    assert config.kv_bytes_per_token(2) == kib_per_token * 1024


@pytest.mark.parametrize("name", TINY)
def test_hf_config_reads_what_transformers_writes(name: str) -> None:
    model = tiny_model(name)
    config = hf_config(json.loads(model.config.to_json_string()))
    theirs = model.config
    sizes = theirs.hidden_size, 3, theirs.num_attention_heads, theirs.num_key_value_heads
    sizes += theirs.head_dim, theirs.intermediate_size, theirs.vocab_size
    assert sizes == tuple(vars(config).values())[1:8]
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.qk_norm == (theirs.model_type == "qwen3")
    assert config.eos_ids == (2,)


@pytest.mark.parametrize("name", TINY)
def test_rope_tables_equal_transformers_bitwise(name: str) -> None:
    reference = tiny_model(name)
    config = hf_config(json.loads(reference.config.to_json_string()))
    rotary = type(reference.model.rotary_emb)(reference.config)
    cos, sin = rotary(torch.zeros(1), torch.arange(200)[None])
    ours = rope_tables(config, 200, "cpu")
    assert torch.equal(ours[0], cos[0])
    assert torch.equal(ours[1], sin[0])


def test_tables_of_layers_without_rotation_are_float32_whatever_torchs_default_is() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        tables = identity_tables(NAMED_SHAPES["smollm3-3b"], 4, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [table.dtype for table in tables] == [torch.float32] * 2


@pytest.mark.parametrize(
    "scaling",
    [RopeScaling(), RopeScaling(RopeScalingKind.FACTORS, factors=(2.0,) * 8)],
    ids=["plain", "factors"],
)
def test_rope_tables_do_not_depend_on_torchs_default_device(scaling: RopeScaling) -> None:
    config = replace(hf_config(LLAMA), rope_scaling=scaling)
    expected = rope_tables(config, 20, "cpu")
    with torch.device("meta"):
        made = rope_tables(config, 20, "cpu")
    assert all(map(torch.equal, made, expected))


def test_older_rope_spelling_means_the_same() -> None:
    scaling = {
        key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_theta", "rope_type")
    }
    scaling["type"] = "llama3"
    older = hf_config({**LLAMA, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert older == hf_config({**LLAMA, "rope_parameters": LLAMA3_ROPE})
    assert older.rope_scaling.kind is RopeScalingKind.LLAMA3


def test_rope_scaling_counts_where_a_file_has_rope_parameters_too() -> None:
    """transformers 5 writes the latter; the former is what people are told to add to stretch a
    model's context.
    """
    linear, yarn = ({"rope_type": name, "factor": 2.0} for name in ("linear", "yarn"))
    fields = {**LLAMA, "rope_parameters": {"rope_theta": 500.0}}
    both = hf_config({**fields, "rope_scaling": linear})
    assert both.rope_scaling == RopeScaling(RopeScalingKind.LINEAR, factor=2.0)
    with pytest.raises(ModelError, match="'yarn' is not supported"):
        hf_config({**fields, "rope_parameters": LLAMA3_ROPE, "rope_scaling": yarn})


@pytest.mark.parametrize(
    ("inside", "beside", "expected"),
    [(64, 32, 32), (None, 32, 32), (64, None, 64), (None, None, 128)],
)
def test_the_trained_context_of_llama3_scaling_may_stand_beside_it(
    inside: int | None, beside: int | None, expected: int
) -> None:
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": inside}
    config = hf_config(
        {**LLAMA, "rope_parameters": rope, "original_max_position_embeddings": beside}
    )
    assert config.rope_scaling.original_max_positions == expected


def test_gguf_frequency_factors_carry_llama3_scaling() -> None:
    """A GGUF file stores Llama 3 scaling as one divisor per frequency."""
    config = NAMED_SHAPES["llama-3.2-1b"]
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    scaled_cos, _ = rope_tables(config, 64, "cpu")
    reference = tiny_model("llama-plain").config
    reference.head_dim, reference.rope_parameters["rope_theta"] = 64, config.rope_theta
    unscaled = plain(reference)[0]
    factors = (unscaled / inverse_frequencies(config)).tolist()
    assert max(factors) == pytest.approx(32.0)
    by_factors = replace(
        config, rope_scaling=RopeScaling(RopeScalingKind.FACTORS, factors=tuple(factors))
    )
    torch.testing.assert_close(rope_tables(by_factors, 64, "cpu")[0], scaled_cos, atol=1e-5, rtol=0)


def test_metadata_config() -> None:
    config = metadata_config(GGUF, tied=True, source="m.gguf")
    sizes = 64, 2, 4, 2, 32, 96, 70
    others = {"tied_embeddings": True, "max_positions": 512, "eos_ids": (5, 6)}
    assert config == ModelConfig(Family.QWEN3, *sizes, **others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "MambaForCausalLM.*supported.*LlamaForCausalLM.*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2.*supported"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected an integer from 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
            "rope_scaling.low_freq_factor is None, expected a finite number",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has 'sliding_attention'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "has 'chunked_attention'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq with bits None"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=rf"some/config\.json: .*{message}"):
        hf_config({**LLAMA, **change}, "some/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3'.*supported"),
        ({"general.architecture": "qwen2"}, "'qwen2'; supported architectures are 'llama' an"),
        ({"qwen3.expert_count": 8}, "8 experts"),
        (
            {"qwen3.rope.dimension_count": 16},
            "rotary embeddings over 16 dimensions and key heads of 32",
        ),
        ({"qwen3.attention.value_length": 16}, "value heads of 16 dimensions"),
        ({"qwen3.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}, "'yarn'"),
        ({"qwen3.rope.scaling.type": 5}, "qwen3.rope.scaling.type is 5, expected a text"),
        (
            {"qwen3.rope.scaling.factor": -2.0},
            r"scaling\.factor is -2\.0, expected a finite number",
        ),
        ({"qwen3.rope.scaling.factor": False}, r"scaling\.factor is False, expected a finite num"),
        ({"qwen3.rope.scale_linear": math.inf}, "scale_linear is inf, expected a finite number ab"),
        ({"qwen3.block_count": 0}, "qwen3.block_count is 0"),
    ],
)
def test_gguf_that_is_not_supported_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=rf"some/m\.gguf: .*{message}"):
        metadata_config({**GGUF, **change}, tied=False, source="some/m.gguf")


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 1.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0}, 1.0),
        ({"rope.scale_linear": 0.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
    ],
    ids=str,
)
def test_gguf_rope_scaling_is_linear_by_its_factor_as_in_llama_cpp(
    change: dict, factor: float
) -> None:
    scaled = metadata_config(
        {**GGUF, **{f"qwen3.{key}": value for key, value in change.items()}},
        tied=True,
        source="m.gguf",
    )
    plain = metadata_config(GGUF, tied=True, source="m.gguf")
    assert plain.rope_scaling == RopeScaling()
    assert torch.equal(inverse_frequencies(scaled), inverse_frequencies(plain) / factor)


FACTORS = (1.0,) * 15


@pytest.mark.parametrize(
    "change",
    [{}, {"type": "none"}, {"type": "linear"}, {"factor": 0.0}, {"type": "none", "factor": 2.0}],
    ids=str,
)
def test_gguf_frequency_factors_stand_beside_a_linear_factor_of_one(change: dict) -> None:
    fields = {**GGUF, **{f"qwen3.rope.scaling.{key}": value for key, value in change.items()}}
    config = metadata_config(fields, tied=True, rope_factors=(*FACTORS, 8.0), source="m.gguf")
    assert config.rope_scaling == RopeScaling(RopeScalingKind.FACTORS, factors=(*FACTORS, 8.0))


def test_gguf_frequency_factors_and_a_linear_factor_together_are_refused() -> None:
    for change in ({"qwen3.rope.scaling.factor": 2.0}, {"qwen3.rope.scale_linear": 2.0}):
        told = (
            r"m\.gguf: linear rope scaling by 2\.0 and a rope_freqs\.weight tensor together are n"
        )
        fields = {**GGUF, **change}
        with pytest.raises(ModelError, match=told):
            metadata_config(fields, tied=True, rope_factors=(*FACTORS, 8.0), source="m.gguf")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_gguf_frequency_factors_that_are_no_divisors_are_refused(value: float) -> None:
    told = rf"m\.gguf: rope_freqs\.weight holds {value} at 15, expected finite numbers above 0"
    with pytest.raises(ModelError, match=told):
        metadata_config(GGUF, tied=True, rope_factors=(*FACTORS, value), source="m.gguf")


def test_with_eos_adds_without_duplicates() -> None:
    config = replace(NAMED_SHAPES["qwen3-4b"], eos_ids=(7,))
    assert config.with_eos(8, None, 7).eos_ids == (7, 8)


@pytest.mark.parametrize("value", [1e-300, 1e-46, 1e300])
def test_constants_that_float32_cannot_hold_are_refused(value: float) -> None:
    """1e-300 became 0, and every frequency infinite."""
    told = rf"is {re.escape(str(value))}, expected a finite number above 0"
    with pytest.raises(ModelError, match=f"rope_theta {told}"):
        hf_config({**LLAMA, "rope_theta": value})
    with pytest.raises(ModelError, match=rf"qwen3\.rope\.freq_base {told}"):
        metadata_config({**GGUF, "qwen3.rope.freq_base": value}, tied=True, source="m.gguf")


def test_a_theta_whose_angles_are_infinite_is_refused() -> None:
    config = hf_config({**LLAMA, "rope_theta": 1e-37, "head_dim": 256}, "some/config.json")
    told = r"some/config\.json: rope_theta 1e-37 and .* make angles beyond float32 at 100000 p"
    with pytest.raises(ModelError, match=told):
        rope_tables(config, 100_000, "cpu")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": LONG},
        {"architectures": [LONG] * 9},
        {"architectures": None, "model_type": LONG},
        {"quantization_config": {"quant_method": LONG}},
        {"rope_scaling": {"type": LONG, "factor": 2}},
        {"hidden_size": LONG},
        {"eos_token_id": [LONG]},
        {"vocab_size": 10**4000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_messages_are_short_whatever_the_file_holds(change: dict) -> None:
    with pytest.raises(ModelError) as raised:
        hf_config({**LLAMA, **change}, "some/config.json")
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    "change",
    [
        {"general.architecture": LONG},
        {"qwen3.expert_count": LONG},
        {"qwen3.rope.scaling.type": LONG},
        {"qwen3.rope.scaling.factor": LONG},
        {"tokenizer.ggml.eos_token_id": LONG},
    ],
    ids=lambda change: next(iter(change)),
)
def test_messages_about_gguf_are_short_too(change: dict) -> None:
    with pytest.raises(ModelError) as raised:
        metadata_config({**GGUF, **change}, tied=True, source="m.gguf")
    assert len(str(raised.value)) < 700
