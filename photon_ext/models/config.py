"""ModelConfig: the shape of a decoder-only transformer. Host data only: no tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from photon_ext.errors import ModelError, shown


class Family(Enum):
    """Families the decoder knows.

    The value is both Hugging Face's `model_type` and GGUF's `general.architecture`.
    """

    LLAMA = "llama"
    QWEN3 = "qwen3"


SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM (model_type 'llama') and Qwen3ForCausalLM (model_type 'qwen3')"
)
MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/common/params.h


class RopeScalingKind(Enum):
    """How the rotary frequencies are stretched beyond the trained context.

    LINEAR divides all of them (Chen et al., "Extending Context Window of Large Language Models via
    Positional Interpolation", 2023); LLAMA3 divides those of long wavelengths, leaves those of
    short ones, and goes over from one to the other between, as Llama 3.1 does.
    """

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
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
    factors: tuple[float, ...] = ()  # [head_dim / 2]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama or Qwen3 decoder. Lengths in elements, positions in tokens.

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
    rope_scaling: RopeScaling = RopeScaling()
    tied_embeddings: bool = False
    attention_bias: bool = False  # q, k, v and o projections carry a bias
    mlp_bias: bool = False  # gate, up and down projections carry a bias
    max_positions: int = 4096
    eos_ids: tuple[int, ...] = ()
    prefers_float32: bool = (
        False  # the file stores float32 on purpose: not rounded unless a dtype is asked for
    )
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
        if self.rope_scaling.factors and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ModelError(
                f"{self.source}: {len(self.rope_scaling.factors)} rope factors, expected "
                f"{self.head_dim // 2}"
            )
        self._check_eos(self.eos_ids, self.source)

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


def unsupported(what: str, source: str) -> ModelError:
    """The error for an architecture that the decoder does not know; `source` is the file."""
    return ModelError(f"{source}: {what}; supported architectures are {SUPPORTED_ARCHITECTURES}")
