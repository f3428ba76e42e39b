"""ModelConfig from the metadata of a GGUF file.

What the decoder does not do is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gguf import Keys, LlamaFileType

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import Family, ModelConfig, RopeScaling, RopeScalingKind
from photon_ext.models.loading.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from photon_ext.models.loading.gguf_file import GgufFile

_FAMILIES = (Family.LLAMA, Family.QWEN3)  # `general.architecture` is the enum's value
ROPE_FACTORS = "rope_freqs.weight"
OUTPUT = "output.weight"
_EOS_KEYS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
_LINEAR_FACTOR_KEYS = ("rope.scaling.factor", "rope.scale_linear")  # newer and older


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model's shape. An absent output head means tied embeddings.

    A rope_freqs tensor carries Llama 3 scaling.
    """
    factors = (
        tuple(file.tensor(ROPE_FACTORS).flatten().tolist())
        if ROPE_FACTORS in file.tensor_names
        else ()
    )
    return metadata_config(
        file.fields,
        tied=OUTPUT not in file.tensor_names,
        rope_factors=factors,
        source=str(file.path),
    )


def metadata_config(
    metadata: Mapping[str, Any], *, tied: bool, rope_factors: tuple[float, ...] = (), source: str
) -> ModelConfig:
    """Reads GGUF metadata.

    `tied`: the file has no output head. `rope_factors`: its rope_freqs.weight, if any.

    Raises ModelError, naming `source`, for an unsupported architecture or option, and for a key
    that is missing or damaged.
    """
    fields = ConfigReader(metadata, source)
    architecture = fields.get("general.architecture")
    family = next((f for f in _FAMILIES if f.value == architecture), None)
    if family is None:
        supported = " and ".join(repr(f.value) for f in _FAMILIES)
        raise ModelError(
            f"{source}: general.architecture is {shown(architecture)}; supported architectures are "
            f"{supported}, and more families as Hugging Face directories"
        )
    prefix = f"{family.value}."
    own = ConfigReader(
        {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)},
        source,
        prefix,
    )
    if own.get("expert_count"):
        raise ModelError(
            f"{source}: a mixture of {shown(own.get('expert_count'))} experts is not supported; "
            "use a dense model"
        )
    hidden, q_heads = own.positive("embedding_length"), own.positive("attention.head_count")
    head_dim = own.positive("attention.key_length", hidden // q_heads)
    for key, what in (
        ("rope.dimension_count", "rotary embeddings over"),
        ("attention.value_length", "value heads of"),
    ):
        if own.positive(key, head_dim) != head_dim:
            raise ModelError(
                f"{source}: {what} {own.get(key)} dimensions and key heads of {head_dim}: not "
                "supported"
            )
    return ModelConfig(
        family=family,
        hidden=hidden,
        layers=own.positive("block_count", most=MAX_LAYERS),
        q_heads=q_heads,
        kv_heads=own.positive("attention.head_count_kv", q_heads),
        head_dim=head_dim,
        intermediate=own.positive("feed_forward_length"),
        vocab=own.positive("vocab_size", len(fields.items("tokenizer.ggml.tokens")) or None),
        rms_eps=own.number("attention.layer_norm_rms_epsilon"),
        rope_theta=own.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(own, rope_factors, source),
        tied_embeddings=tied,
        max_positions=own.positive("context_length", most=MAX_POSITIONS),
        eos_ids=tuple(dict.fromkeys(token for key in _EOS_KEYS for token in fields.token_ids(key))),
        prefers_float32=fields.get("general.file_type") == LlamaFileType.ALL_F32,
        source=source,
    )


def _rope_scaling(own: ConfigReader, factors: tuple[float, ...], source: str) -> RopeScaling:
    """As llama.cpp reads it.

    Without a type the scaling is linear, without a factor (or with 0) it is by 1.
    """
    wrong = next(
        (
            index
            for index, factor in enumerate(factors)
            if not (math.isfinite(factor) and factor > 0)
        ),
        None,
    )
    if wrong is not None:
        raise ModelError(
            f"{source}: {ROPE_FACTORS} holds {factors[wrong]} at {wrong}, expected finite numbers "
            "above 0; "
            "the file is damaged, download it again"
        )
    name = own.text("rope.scaling.type")
    name = "linear" if name is None else name
    if name not in ("none", "linear"):
        raise ModelError(
            f"{source}: rope scaling {shown(name)} is not supported; supported are 'none', "
            "'linear' and a rope_freqs tensor"
        )
    factor = _linear_factor(own) if name == "linear" else 1.0
    if factor == 1.0:
        return RopeScaling(RopeScalingKind.FACTORS, factors=factors) if factors else RopeScaling()
    if factors:
        raise ModelError(
            f"{source}: linear rope scaling by {factor} and a {ROPE_FACTORS} tensor together are "
            "not supported; use another file"
        )
    return RopeScaling(RopeScalingKind.LINEAR, factor=factor)


def _linear_factor(own: ConfigReader) -> float:
    key = next(
        (key for key in _LINEAR_FACTOR_KEYS if own.get(key) is not None), _LINEAR_FACTOR_KEYS[0]
    )
    value = own.get(key)
    return 1.0 if value == 0 and not isinstance(value, bool) else own.number(key, 1.0)
