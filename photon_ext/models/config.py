"""ModelConfig: the shape of a decoder-only transformer. Host data only: no tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from photon_ext.errors import ConfigError, ModelError, shown
from photon_ext.models.quantization import Quantization


class Family(Enum):
    """Families the decoder knows. The value is Hugging Face's `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"
    GRANITE = "granite"
    SMOLLM3 = "smollm3"
    PHI3 = "phi3"


MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/common/params.h
_FUSED_QKV = "model.layers.0.self_attn.qkv_proj"


class RopeScalingKind(Enum):
    """How the rotary frequencies are stretched beyond the trained context.

    LINEAR divides all of them (Chen et al., "Extending Context Window of Large Language Models via
    Positional Interpolation", 2023); LLAMA3 divides those of long wavelengths, leaves those of
    short ones, and goes over from one to the other between, as Llama 3.1 does. LONGROPE has a
    divisor for each, others for texts beyond the trained context, and multiplies cos and sin.
    """

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"
    FACTORS = (
        "factors"  # GGUF stores one divisor per frequency; this is how it carries Llama 3 scaling
    )


@dataclass(frozen=True)
class RopeScaling:
    """Parameters of `RopeScalingKind`. Fields that a kind does not use keep their defaults."""

    kind: RopeScalingKind = RopeScalingKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    factors: tuple[float, ...] = ()  # [rotary_dims / 2]: divisors
    long_factors: tuple[float, ...] = ()  # of texts beyond original_max_positions
    amplitude: float = 1.0  # of cos and sin


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder. Lengths in elements, positions in tokens.

    Raises:
        ModelError: a size is not positive, or two contradict each other.
    """

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
    rotary_dims: int | None = None  # the first of each head, which are rotated; None: all
    rope_scaling: RopeScaling = RopeScaling()
    unrotated: tuple[int, ...] = ()  # layers whose q and k are not rotated
    attention_scale: float | None = None  # of q's products with k; None: head_dim ** -0.5
    residual_multiplier: float = 1.0  # of what o and down add to the residual
    logits_divisor: float = 1.0
    tied_embeddings: bool = False
    qkv_bias: bool = False  # q, k and v projections carry a bias
    o_bias: bool = False  # the o projection carries a bias
    mlp_bias: bool = False  # gate, up and down projections carry a bias
    max_positions: int = 4096
    window: int | None = None  # tokens that attention reaches back to; longer texts are refused
    eos_ids: tuple[int, ...] = ()
    prefers_float32: bool = (
        False  # the file stores float32 on purpose: not rounded unless a dtype is asked for
    )
    quantization: Quantization | None = None  # of weights; None: they are of the model's dtype
    source: str = field(default="model config", repr=False, compare=False)  # the file, for errors

    def __post_init__(self) -> None:
        for name in (
            "hidden",
            "layers",
            "q_heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "vocab",
            "max_positions",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ModelError(
                    f"{self.source}: {name} is {shown(value)}, expected a positive integer; the "
                    "config file is damaged"
                )
        if self.q_heads % self.kv_heads != 0:
            raise ModelError(
                f"{self.source}: {self.q_heads} query heads are not a multiple of {self.kv_heads} "
                "key/value heads"
            )
        if self.head_dim % 2 != 0 or self.head_dim > MAX_HEAD_DIM:
            raise ModelError(
                f"{self.source}: head_dim is {self.head_dim}, expected an even number up to "
                f"{MAX_HEAD_DIM}"
            )
        if self.rope_scaling.factors and len(self.rope_scaling.factors) != self.rotated // 2:
            raise ModelError(
                f"{self.source}: {len(self.rope_scaling.factors)} rope factors, expected "
                f"{self.rotated // 2}"
            )
        qkv = None if self.quantization is None else self.quantization.of(_FUSED_QKV)
        if qkv is not None and qkv.rows > 1 and self.fused_modules and self.reorders_heads:
            raise ModelError(
                f"{self.source}: weights have scales of blocks of rows, and rows of q and k change "
                "their order as they are loaded, because a part of each head is rotated; use a "
                "checkpoint with a scale for each row"
            )
        self._check_eos(self.eos_ids, self.source)

    @property
    def qk_norm(self) -> bool:
        """Whether q and k heads are RMS-normalized before the rotation (Qwen3)."""
        return self.family is Family.QWEN3

    @property
    def fused_modules(self) -> bool:
        """Whether q, k, v are one module of a checkpoint, and gate, up another (Phi-3)."""
        return self.family is Family.PHI3

    @property
    def reorders_heads(self) -> bool:
        """Whether rows of q and k change their order as they are loaded."""
        return self.rotated < self.head_dim

    @property
    def rotated(self) -> int:
        """Elements of each q and k head that are rotated."""
        return self.rotary_dims or self.head_dim

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

    @property
    def longest(self) -> int:
        """Positions that a text may have: within them a window hides nothing."""
        return min(self.max_positions, self.window or self.max_positions)

    def check_max_len(self, max_len: int) -> None:
        """Raises ConfigError for more positions than the model has, or than its window."""
        if max_len > self.max_positions:
            raise ConfigError(
                f"max_len is {max_len} and the model was made for {self.max_positions} positions; "
                "ask for no more than that"
            )
        if max_len > self.longest:
            raise ConfigError(
                f"max_len is {max_len} and attention of the model has a window of {self.window} "
                "tokens; windows are not supported, so ask for no more than that"
            )

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV cache that one token occupies over all layers."""
        return 2 * self.layers * self.kv_size * element_size

    def with_eos(self, *ids: int | None, source: str | None = None) -> ModelConfig:
        """A copy whose `eos_ids` also hold `ids`, which are from the file `source`.

        None is ignored, the order is kept, and there are no duplicates.

        Raises:
            ModelError: one is not in the vocabulary.
        """
        added = tuple(token for token in ids if token is not None)
        self._check_eos(added, source or self.source)
        return replace(self, eos_ids=tuple(dict.fromkeys(self.eos_ids + added)))

    def _check_eos(self, ids: tuple[int, ...], source: str) -> None:
        foreign = next((token for token in ids if not 0 <= token < self.vocab), None)
        if foreign is not None:
            raise ModelError(
                f"{source}: end token {foreign} is not in the vocabulary of {self.vocab}; the "
                "files belong to two models"
            )
