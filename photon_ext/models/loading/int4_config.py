"""Int4Scheme from the `quantization_config` of a Hugging Face config.json.

Three makers of weights of four bits are read: GPTQ (AutoGPTQ, GPTQModel, optimum), AWQ (AutoAWQ)
and compressed-tensors' "pack-quantized" (llm-compressor). Everything else is refused by name,
because the numbers would be others. What a scheme does to activations is no reason to refuse it:
they stay in the dtype of the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from photon_ext.errors import shown
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.quantization_fields import (
    HEAD,
    compressed_weights,
    expressions,
    module_names,
    refuse,
)
from photon_ext.models.quantization import EMBEDDING, StoredFormat, is_left_out
from photon_ext.weight_format import WeightFormat

GROUP_STEP = 32  # columns: groups are of a multiple of them
# of compressed-tensors: columns were quantized in another order, and are stored in their own
_ORDERS_THAT_STAY = (None, False, "weight", "static")


class Layout(Enum):
    """How the files store codes and zero points; int4_tensors.py reads each."""

    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"
    COMPRESSED = "compressed-tensors"


@dataclass(frozen=True)
class Int4Scheme:
    """Numbers of four bits, (bits - zero) * scale.

    Attributes:
        layout: how the files store them.
        group: columns of a row that share a scale, a multiple of 32; None: all of a row.
        zeros: each group has a zero point; else it is 8.
        left_out: modules whose weights have the dtype of the model: regular expressions that match
            the whole of their names.
        scale_dtype: of the files, by its name.
    """

    layout: Layout
    group: int | None
    zeros: bool
    left_out: tuple[str, ...] = ()
    scale_dtype: str = "float16"

    def of(self, module: str) -> StoredFormat | None:
        if module == EMBEDDING or is_left_out(module, self.left_out):
            return None
        return StoredFormat(
            WeightFormat.INT4, 1, self.group, zeros=self.zeros, scale_dtype=self.scale_dtype
        )

    def __str__(self) -> str:
        share = "one a row" if self.group is None else f"one for {self.group} columns of a row"
        return f"int4 weights, scales {share}{', with zero points' if self.zeros else ''}"


def int4_scheme(config: ConfigReader, source: str) -> Int4Scheme:
    """Of the fields of a `quantization_config`. ModelError: weights are stored in another way, or
    the file is damaged.
    """
    method = config.get("quant_method")
    if method == "gptq":
        return _gptq(config, source)
    if method == "awq":
        return _awq(config, source)
    if method == "compressed-tensors":
        return _compressed(config, source)
    refuse(source, f"quant_method {shown(method)}")


def _gptq(config: ConfigReader, source: str) -> Int4Scheme:
    _four_bits(config, source)
    named = config.text("checkpoint_format") or config.text("format") or "gptq"
    written = named.lower()
    if written not in (Layout.GPTQ.value, Layout.GPTQ_V2.value):
        refuse(source, f"gptq with checkpoint_format {shown(written)}")
    if config.flag("is_marlin_format"):
        refuse(source, "gptq with is_marlin_format true")
    if config.get("pack_dtype") not in (None, "int32"):
        refuse(source, f"gptq with pack_dtype {shown(config.get('pack_dtype'))}")
    if config.flag("desc_act"):
        refuse(
            source,
            "gptq with desc_act true (columns of a group lie apart; use a checkpoint made with "
            "desc_act false)",
        )
    _all_alike(config, source, "dynamic", "modules_in_block_to_quantize")
    left_out = () if config.flag(HEAD) else _and_below([HEAD], HEAD, source)
    return Int4Scheme(
        Layout(written), _group(config, source), not config.flag("sym", True), left_out
    )


def _awq(config: ConfigReader, source: str) -> Int4Scheme:
    _four_bits(config, source)
    version = config.text("version") or config.text("format") or "gemm"
    if version.lower() != "gemm":
        refuse(source, f"awq with version {shown(version)}")
    _all_alike(config, source, "dynamic")
    key = "modules_to_not_convert"
    # AutoAWQ quantizes what is in layers, and so no head
    left_out = _and_below([HEAD, *module_names(config, key)], key, source)
    return Int4Scheme(Layout.AWQ, _group(config, source), config.flag("zero_point", True), left_out)


def _compressed(config: ConfigReader, source: str) -> Int4Scheme:
    found = compressed_weights(config, source)
    weights = found.weights
    kind = weights.get("type"), weights.get("num_bits")
    if found.format != "pack-quantized" or kind != ("int", 4):
        refuse(source, found.title)
    strategy, order = weights.get("strategy"), weights.get("actorder")
    if strategy not in ("group", "channel"):
        refuse(source, f"compressed-tensors of 4 bits with strategy {shown(strategy)}")
    if order not in _ORDERS_THAT_STAY:
        refuse(
            source,
            f"compressed-tensors with actorder {shown(order)} (columns of a group lie apart; use a "
            'checkpoint made with actorder "static" or without)',
        )
    group = _group(weights, source) if strategy == "group" else None
    return Int4Scheme(Layout.COMPRESSED, group, not weights.flag("symmetric", True), found.left_out)


def _four_bits(config: ConfigReader, source: str) -> None:
    if config.get("bits") != 4:
        refuse(source, f"{config.get('quant_method')} with bits {shown(config.get('bits'))}")


def _all_alike(config: ConfigReader, source: str, *keys: str) -> None:
    """Refuses keys by which some modules are stored in another way."""
    for key in keys:
        if config.get(key):
            refuse(source, f"{config.get('quant_method')} with {key} {shown(config.get(key))}")


def _group(config: ConfigReader, source: str) -> int | None:
    size = config.get("group_size")
    if size == -1:
        return None
    if type(size) is not int or size < 1 or size % GROUP_STEP:
        refuse(source, f"int4 weights with group_size {shown(size)}")
    return size


def _and_below(names: list[str], key: str, source: str) -> tuple[str, ...]:
    """A name is an expression from the begin of a module's, or parts of it as they stand; and what
    is below it is left out too.
    """
    patterns = [f"(?:{name})(?:\\..*)?|(?:.*\\.)?{re.escape(name)}(?:\\..*)?" for name in names]
    return expressions(patterns, key, source)
