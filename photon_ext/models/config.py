"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json or from GGUF metadata.

Everything here is host data: no tensors, no torch. A file that asks for something the decoder does not do (another
architecture, sliding windows, partial rotary embeddings, ...) is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from photon_ext.errors import ModelError


class Family(Enum):
    """Families the decoder knows; the value is both Hugging Face's `model_type` and GGUF's `general.architecture`."""

    LLAMA = "llama"
    QWEN3 = "qwen3"


SUPPORTED_ARCHITECTURES = "LlamaForCausalLM (model_type 'llama') and Qwen3ForCausalLM (model_type 'qwen3')"
_HF_ARCHITECTURES = {"LlamaForCausalLM": Family.LLAMA, "Qwen3ForCausalLM": Family.QWEN3}


class RopeScalingKind(Enum):
    """How the rotary frequencies are stretched beyond the trained context."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # GGUF stores one divisor per frequency; this is how it carries Llama 3 scaling


@dataclass(frozen=True)
class RopeScaling:
    """Parameters of `RopeScalingKind`. Fields that a kind does not use keep their defaults."""

    kind: RopeScalingKind = RopeScalingKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    factors: tuple[float, ...] = ()  # [head_dim / 2]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama or Qwen3 decoder. Lengths in elements, positions in tokens."""

    family: Family
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tied_embeddings: bool = False
    attention_bias: bool = False  # q, k, v and o projections carry a bias
    mlp_bias: bool = False  # gate, up and down projections carry a bias
    max_positions: int = 4096
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    prefers_float32: bool = False  # the file stores float32 on purpose: not rounded unless a dtype is asked for

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ModelError(f"model config: {name} is {value!r}, expected a positive integer; the config file is damaged")
        if self.q_heads % self.kv_heads != 0:
            raise ModelError(f"model config: {self.q_heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.head_dim % 2 != 0 or self.head_dim > MAX_HEAD_DIM:
            raise ModelError(f"model config: head_dim is {self.head_dim}, expected an even number up to {MAX_HEAD_DIM}")
        if self.rope_scaling.factors and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ModelError(f"model config: {len(self.rope_scaling.factors)} rope factors, expected {self.head_dim // 2}")

    @property
    def qk_norm(self) -> bool:
        """Whether q and k heads are RMS-normalized before the rotation (Qwen3)."""
        return self.family is Family.QWEN3

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or all value heads) of one token."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.q_size + 2 * self.kv_size

    def weight_bytes_per_step(self, element_size: int) -> int:
        """Bytes of weights that one decode step reads: every layer and the output head, not the embedding table."""
        attention = self.hidden * (self.qkv_size + self.q_size)
        mlp = 3 * self.hidden * self.intermediate
        return element_size * (self.layers * (attention + mlp) + self.vocab * self.hidden)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV cache that one token occupies over all layers."""
        return 2 * self.layers * self.kv_size * element_size

    def with_eos(self, *ids: int | None) -> ModelConfig:
        """A copy whose `eos_ids` also hold `ids` (None is ignored, order kept, no duplicates)."""
        merged = dict.fromkeys([*self.eos_ids, *(i for i in ids if i is not None)])
        return replace(self, eos_ids=tuple(merged))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face config dictionary, in the spelling of transformers 5 (`rope_parameters`) or older.

        Raises ModelError, naming `source`, for an unsupported architecture, option, or a missing key.
        """
        family = _hf_family(config, source)
        _reject_hf_options(config, source)
        hidden, q_heads = _integer(config, "hidden_size", source), _integer(config, "num_attention_heads", source)
        max_positions = _integer(config, "max_position_embeddings", source)
        theta, scaling = _hf_rope(config, max_positions, source)
        head_dim = config.get("head_dim") or (128 if family is Family.QWEN3 else hidden // q_heads)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        return cls(
            family=family,
            hidden=hidden,
            layers=_integer(config, "num_hidden_layers", source),
            q_heads=q_heads,
            kv_heads=config.get("num_key_value_heads") or q_heads,
            head_dim=head_dim,
            intermediate=_integer(config, "intermediate_size", source),
            vocab=_integer(config, "vocab_size", source),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            max_positions=max_positions,
            eos_ids=token_ids(config.get("eos_token_id")),
            bos_id=next(iter(token_ids(config.get("bos_token_id"))), None),
            prefers_float32=dtype in ("float32", "torch.float32"),
        )

    @classmethod
    def from_gguf(
        cls,
        fields: Mapping[str, Any],
        *,
        tied: bool,
        rope_factors: tuple[float, ...] = (),
        source: str = "the GGUF file",
    ) -> ModelConfig:
        """Reads GGUF metadata. `tied`: the file has no output head. `rope_factors`: its rope_freqs.weight, if any.

        Raises ModelError, naming `source`, for an unsupported architecture, option, or a missing key.
        """
        architecture = fields.get("general.architecture")
        family = next((f for f in Family if f.value == architecture), None)
        if family is None:
            raise _unsupported(f"general.architecture is {architecture!r}", source)
        prefix = f"{family.value}."
        own = {key[len(prefix) :]: value for key, value in fields.items() if key.startswith(prefix)}
        if own.get("expert_count"):
            raise ModelError(f"{source}: a mixture of {own['expert_count']} experts is not supported; use a dense model")
        hidden, q_heads = _integer(own, "embedding_length", source), _integer(own, "attention.head_count", source)
        head_dim = own.get("attention.key_length") or hidden // q_heads
        if own.get("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{source}: rotary embeddings over {own['rope.dimension_count']} of {head_dim} dimensions: not supported")
        if own.get("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{source}: value heads of {own['attention.value_length']}, key heads of {head_dim}: not supported")
        return cls(
            family=family,
            hidden=hidden,
            layers=_integer(own, "block_count", source),
            q_heads=q_heads,
            kv_heads=own.get("attention.head_count_kv") or q_heads,
            head_dim=head_dim,
            intermediate=_integer(own, "feed_forward_length", source),
            vocab=own.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ())),
            rms_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(own.get("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_rope_scaling(own, rope_factors, source),
            tied_embeddings=tied,
            max_positions=_integer(own, "context_length", source),
            eos_ids=tuple(dict.fromkeys(token_ids([fields[k] for k in _GGUF_EOS_KEYS if k in fields]))),
            bos_id=fields.get("tokenizer.ggml.bos_token_id"),
            prefers_float32=fields.get("general.file_type") == 0,
        )


MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/common/params.h
_GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or None, as config files write them, as a tuple."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _unsupported(what: str, source: str) -> ModelError:
    return ModelError(f"{source}: {what}; supported architectures are {SUPPORTED_ARCHITECTURES}")


def _integer(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{source}: {key} is {value!r}, expected an integer; the file is damaged or not a model's config")
    return value


def _hf_family(config: Mapping[str, Any], source: str) -> Family:
    architectures = config.get("architectures") or ()
    if architectures:
        family = _HF_ARCHITECTURES.get(architectures[0])
    else:
        family = next((f for f in Family if f.value == config.get("model_type")), None)
    if family is None:
        raise _unsupported(f"architecture is {list(architectures)!r}, model_type {config.get('model_type')!r}", source)
    return family


def _reject_hf_options(config: Mapping[str, Any], source: str) -> None:
    """Options that would silently change the numbers if they were ignored."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source}: hidden_act is {config['hidden_act']!r}, only 'silu' is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{source}: weights quantized with {method!r} are not supported; use plain weights or a GGUF file")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types or (config.get("use_sliding_window") and config.get("sliding_window")):
        raise ModelError(f"{source}: sliding-window attention is not supported; use a model with full attention in every layer")


def _hf_rope(config: Mapping[str, Any], max_positions: int, source: str) -> tuple[float, RopeScaling]:
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelError(f"{source}: partial_rotary_factor is not 1; rotary embeddings over a part of the head are not supported")
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if name == "default":
        return theta, RopeScaling()
    try:
        if name == "linear":
            return theta, RopeScaling(RopeScalingKind.LINEAR, factor=float(parameters["factor"]))
        if name == "llama3":
            return theta, RopeScaling(
                RopeScalingKind.LLAMA3,
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_positions=int(parameters.get("original_max_position_embeddings") or max_positions),
            )
    except KeyError as missing:
        raise ModelError(f"{source}: rope scaling {name!r} lacks {missing}; the config file is damaged") from None
    raise ModelError(f"{source}: rope scaling {name!r} is not supported; supported are 'default', 'linear' and 'llama3'")


def _gguf_rope_scaling(own: Mapping[str, Any], factors: tuple[float, ...], source: str) -> RopeScaling:
    name = own.get("rope.scaling.type", "none")
    if factors and name == "none":
        return RopeScaling(RopeScalingKind.FACTORS, factors=factors)
    if name == "none":
        return RopeScaling()
    if name == "linear" and not factors:
        return RopeScaling(RopeScalingKind.LINEAR, factor=float(own.get("rope.scaling.factor", 1.0)))
    raise ModelError(f"{source}: rope scaling {name!r} is not supported; supported are 'none', 'linear' and a rope_freqs tensor")


_LLAMA32_SCALING = RopeScaling(RopeScalingKind.LLAMA3, 32.0, 1.0, 4.0, 8192)


def _qwen3(hidden: int, layers: int, q_heads: int, intermediate: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family=Family.QWEN3,
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=151936,
        rope_theta=1e6,
        tied_embeddings=tied,
        max_positions=40960,
        eos_ids=(151645, 151643),
        bos_id=151643,
    )


# Shapes of published models, for benchmarks with random weights.
NAMED_SHAPES: Mapping[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "llama-3.2-1b": ModelConfig(
        family=Family.LLAMA,
        hidden=2048,
        layers=16,
        q_heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=128256,
        rms_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA32_SCALING,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(128001,),
        bos_id=128000,
    ),
}
