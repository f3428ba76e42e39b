"""ModelConfig from a Hugging Face config.json.

A file that asks for something the decoder does not do (another architecture or activation, a
rotation that no table of ours expresses, ...) is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from photon_ext.models.loading.hf_quantization import hf_quantization
from photon_ext.models.loading.hf_rope import RotaryDefaults, hf_rotary

_SLIDING = "sliding_attention"


class _Defaults(NamedTuple):
    """What transformers knows of a family where its config.json does not say it."""

    architecture: str
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    biases: tuple[bool, bool] | None = None  # of q, k, v and of o; None: `attention_bias`
    window: int | None = None  # where `sliding_window` is absent; null is none
    always_slides: bool = False  # `use_sliding_window` and `layer_types` play no part
    rotary: RotaryDefaults = RotaryDefaults()
    skips_rotation: bool = False  # in the layers that `no_rope_layers` has a 0 for
    multipliers: bool = False  # of embeddings, residual, attention and logits
    tied: bool = False  # where `tie_word_embeddings` is absent


_FAMILIES = {
    Family.LLAMA: _Defaults("LlamaForCausalLM"),
    Family.QWEN2: _Defaults("Qwen2ForCausalLM", biases=(True, False), window=4096),
    Family.QWEN3: _Defaults("Qwen3ForCausalLM", head_dim=128, window=4096),
    Family.MISTRAL: _Defaults(
        "MistralForCausalLM", biases=(False, False), window=4096, always_slides=True
    ),
    Family.GRANITE: _Defaults("GraniteForCausalLM", multipliers=True),
    Family.SMOLLM3: _Defaults(
        "SmolLM3ForCausalLM", rotary=RotaryDefaults(theta=2e6), skips_rotation=True, tied=True
    ),
    Family.PHI3: _Defaults(
        "Phi3ForCausalLM",
        biases=(False, False),
        always_slides=True,
        rotary=RotaryDefaults(partial=True),
    ),
}


def hf_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a config dictionary, in the spelling of transformers 5 (`rope_parameters`) or older.

    Raises ModelError, naming `source`, for an unsupported architecture or option, and for a key
    that is missing or damaged.
    """
    fields = ConfigReader(values, source)
    family = _family(fields, source)
    known = _FAMILIES[family]
    _refuse_options(fields, source)
    hidden, q_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    layers = fields.positive("num_hidden_layers", most=MAX_LAYERS)
    max_positions = fields.positive("max_position_embeddings", most=MAX_POSITIONS)
    head_dim = fields.positive("head_dim", known.head_dim or hidden // q_heads)
    rotary = hf_rotary(fields, known.rotary, head_dim, max_positions, source)
    multipliers = _multipliers(fields) if known.multipliers else _Multipliers()
    quantization = hf_quantization(fields, source)
    qkv_bias, o_bias = known.biases or (fields.flag("attention_bias"),) * 2
    return ModelConfig(
        family=family,
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=fields.positive("num_key_value_heads", q_heads),
        head_dim=head_dim,
        intermediate=fields.positive("intermediate_size"),
        vocab=fields.positive("vocab_size"),
        rms_eps=fields.number("rms_norm_eps") / multipliers.embedding**2,
        rope_theta=rotary.theta,
        rotary_dims=rotary.dims,
        rope_scaling=rotary.scaling,
        unrotated=_unrotated(fields, layers) if known.skips_rotation else (),
        attention_scale=multipliers.attention,
        residual_multiplier=multipliers.residual / multipliers.embedding,
        logits_divisor=multipliers.logits,
        tied_embeddings=fields.flag("tie_word_embeddings", known.tied),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        max_positions=max_positions,
        window=_window(fields, known, source),
        eos_ids=fields.token_ids("eos_token_id"),
        prefers_float32=str(fields.get("dtype") or fields.get("torch_dtype"))
        in ("float32", "torch.float32"),
        quantization=quantization,
        source=source,
    )


def _family(fields: ConfigReader, source: str) -> Family:
    architectures, model_type = fields.items("architectures"), fields.get("model_type")
    for family, known in _FAMILIES.items():
        if (
            (architectures[0] == known.architecture)
            if architectures
            else (model_type == family.value)
        ):
            return family
    supported = ", ".join(known.architecture for known in _FAMILIES.values())
    raise ModelError(
        f"{source}: architecture is {shown(architectures)}, model_type {shown(model_type)}; "
        f"supported architectures are {supported}"
    )


def _refuse_options(fields: ConfigReader, source: str) -> None:
    """Options that would silently change the numbers if they were ignored."""
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise ModelError(f"{source}: hidden_act is {shown(activation)}, only 'silu' is supported")


class _Multipliers(NamedTuple):
    """Those of Granite.

    The decoder has none for embeddings, so that a head may be tied to their table: its residual is
    the model's divided by `embedding`. So is what layers add to it, and by the square of that the
    epsilon of their norms, which give the same numbers then.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None


def _multipliers(fields: ConfigReader) -> _Multipliers:
    return _Multipliers(
        fields.number("embedding_multiplier", 1.0),
        fields.number("residual_multiplier", 1.0),
        fields.number("logits_scaling", 1.0),
        fields.number("attention_multiplier", 1.0),
    )


def _unrotated(fields: ConfigReader, layers: int) -> tuple[int, ...]:
    """A 1 in `no_rope_layers` stands for rotation. Without the list each fourth layer, or one of
    `no_rope_layer_interval`, goes without.
    """
    if fields.get("no_rope_layers") is None:
        every = fields.positive("no_rope_layer_interval", 4)
        return tuple(range(every - 1, layers, every))
    flags = fields.items("no_rope_layers")
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        fields.refuse("no_rope_layers", f"a list of 0 or 1 for each of {layers} layers")
    return tuple(layer for layer in range(layers) if flags[layer] == 0)


def _window(fields: ConfigReader, known: _Defaults, source: str) -> int | None:
    """How many tokens attention of some layer sees, where it does not see all.

    Which layers these are does not matter: texts of up to as many tokens are the same to all.
    """
    types = fields.items("layer_types")
    window = known.window if not fields.has("sliding_window") else None
    if fields.get("sliding_window") is not None:
        window = fields.positive("sliding_window", most=MAX_POSITIONS)
    slides = fields.flag("use_sliding_window") and (not types or _SLIDING in types)
    if not (slides or known.always_slides):
        window = None
    others = [kind for kind in types if kind not in ("full_attention", _SLIDING)]
    if others or (window is None and _SLIDING in types):
        raise ModelError(
            f"{source}: layer_types has {shown((others or [_SLIDING])[0])}; supported are "
            "full_attention in every layer, and sliding_attention of a window that the file turns "
            "on"
        )
    return window
