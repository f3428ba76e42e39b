"""What becomes of weights as they are loaded: `quantize=` of load_model, and the blocks of GGUF
files. Host data only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.projections import layer_projections
from photon_ext.models.quantization import EMBEDDING, ModuleFormats, StoredFormat
from photon_ext.weight_format import WeightFormat

GROUPS = (128, 64, 32)  # columns of int4 that share a scale: the first that divides those of a row
CHOICES = ("stored", "none", "fp8", "int4")

_INT4, _INT8 = WeightFormat.INT4, WeightFormat.INT8
# How Hopper kernels read the codes of a GGUF file's blocks: the scales lie beside them. Not those
# of q5_1 and q5_k, which would need int8 with offsets
GROUPED: Mapping[WeightFormat, StoredFormat] = {
    WeightFormat.Q4_0: StoredFormat(_INT4, columns=32, scale_dtype="float16"),
    WeightFormat.Q4_1: StoredFormat(_INT4, columns=32, offsets=True, scale_dtype="float16"),
    WeightFormat.Q4_K: StoredFormat(_INT4, columns=32, offsets=True, scale_dtype="float16"),
    WeightFormat.Q5_0: StoredFormat(_INT8, columns=32, scale_dtype="float16"),
    WeightFormat.Q8_0: StoredFormat(_INT8, columns=32, scale_dtype="float16"),
    WeightFormat.Q6_K: StoredFormat(_INT8, columns=16, scale_dtype="float16"),
}


def checked_quantize(quantize: str | None) -> str | None:
    """ConfigError: it is none of CHOICES, or None."""
    if quantize is None or quantize in CHOICES:
        return quantize
    raise ConfigError(
        f"quantize is {shown(quantize)}; give 'stored' (as the file has them), 'none' (all in the "
        "dtype of the model), 'fp8' or 'int4'"
    )


def requantized(config: ModelConfig, quantize: str | None) -> ModelConfig:
    """The model whose weights in memory are as `quantize` says, one of CHOICES; None: as the file
    has them.
    """
    if quantize in (None, "stored"):
        return config
    found = None if quantize == "none" else ModuleFormats(dict(_rounded(config, quantize)))
    return replace(config, quantization=found)


def in_groups(config: ModelConfig) -> ModelConfig:
    """The model whose blocks of GGUF files lie in memory as GROUPED has them; others stay."""
    found = config.quantization
    if not isinstance(found, ModuleFormats):
        return config
    formats = {name: GROUPED.get(one.format, one) for name, one in found.formats.items()}
    return replace(config, quantization=ModuleFormats(formats))


def _rounded(config: ModelConfig, quantize: str | None) -> Iterator[tuple[str, StoredFormat]]:
    """The format of every linear. The head is in fp8, whose errors go straight into logits, and so
    is a table of embeddings that is the head.
    """
    rows = StoredFormat(WeightFormat.FP8)
    for index in range(config.layers):
        for shape in layer_projections(config, index).values():
            group = next((one for one in GROUPS if shape.k % one == 0), None)
            stored = rows
            if quantize == "int4" and group is not None:
                stored = StoredFormat(WeightFormat.INT4, columns=group, scale_dtype="float16")
            yield from ((f"model.layers.{index}.{module}", stored) for module in shape.modules)
    yield EMBEDDING if config.tied_embeddings else "lm_head", rows
