"""Quantization from the `quantization_config` of a Hugging Face config.json.

fp8 weights are read of quant_method "fp8" (Qwen3-FP8, DeepSeek) with blocks of 128 x 128, and of
compressed-tensors' "float-quantized", with scales of a matrix, of rows, or of such blocks; mxfp4
and nvfp4 of its "mxfp4-pack-quantized" and "nvfp4-pack-quantized"; integers of four bits as
int4_config.py has it. Everything else is refused by name, because the numbers would be others. What
a scheme does to activations is no reason to refuse it: they stay in the dtype of the model, which
is more exact, unless an engine has activations="fp8", whose scales are made anew for each token.
Those that a static scheme stores (`input_scale`, `input_global_scale`) are not read.
"""

from __future__ import annotations

import re

from photon_ext.errors import shown
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.int4_config import int4_scheme
from photon_ext.models.loading.quantization_fields import (
    HEAD,
    CompressedWeights,
    compressed_weights,
    expressions,
    module_names,
    refuse,
)
from photon_ext.models.quantization import Fp4Scheme, Fp8Scheme, Quantization, ScaleShare
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat

# of inputs, and of keys and values
ACTIVATION_SCALES = ("input_scale", "input_global_scale", ".k_scale", ".v_scale")
_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
# by compressed-tensors' names, with its strategy
_FP4 = {
    "mxfp4-pack-quantized": (WeightFormat.MXFP4, "group"),
    "nvfp4-pack-quantized": (WeightFormat.NVFP4, "tensor_group"),
}


def hf_quantization(fields: ConfigReader, source: str) -> Quantization | None:
    """Of the fields of a config.json; None: weights are plain. ModelError: they are stored in
    another way, or the file is damaged.
    """
    config = fields.object("quantization_config") or fields.object("compression_config")
    if config is None:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        return _blocks_of_fp8(config, source)
    if method == "compressed-tensors":
        found = compressed_weights(config, source)
        if found.format == "float-quantized":
            return _compressed_fp8(found, source)
        if isinstance(found.format, str) and found.format in _FP4:
            return _compressed_fp4(found, source)
    return int4_scheme(config, source)


def _blocks_of_fp8(config: ConfigReader, source: str) -> Fp8Scheme:
    block = config.items("weight_block_size")
    if block != _BLOCK:
        refuse(source, f"fp8 weights with weight_block_size {shown(block or None)}")
    for key, only in (("fmt", "e4m3"), ("scale_fmt", "float")):
        if config.get(key) not in (None, only):
            refuse(source, f"fp8 weights with {key} {shown(config.get(key))}")
    if config.items("modules_to_convert"):
        refuse(source, f"fp8 modules_to_convert {shown(config.items('modules_to_convert'))}")
    key = "modules_to_not_convert" if config.has("modules_to_not_convert") else "ignored_layers"
    names = module_names(config, key)
    # transformers takes a name for an expression of a module and what is below it, or for the end
    # of one; without names it leaves out the head
    patterns = [f"(?:{name})(?:\\..*)?|(?:.*\\.)?{re.escape(name)}" for name in names or [HEAD]]
    left_out = expressions(patterns, key, source)
    return Fp8Scheme(ScaleShare.BLOCK, "weight_scale_inv", left_out)


def _compressed_fp8(found: CompressedWeights, source: str) -> Fp8Scheme:
    weights = found.weights
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        refuse(source, found.title)
    if weights.get("symmetric") is False or weights.get("actorder"):
        refuse(source, "compressed-tensors with zero points or actorder")
    return Fp8Scheme(_share(weights, source), "weight_scale", found.left_out)


def _compressed_fp4(found: CompressedWeights, source: str) -> Fp4Scheme:
    form, strategy = _FP4[found.format]
    weights = found.weights
    if (weights.get("type"), weights.get("num_bits")) != ("float", 4):
        refuse(source, found.title)
    for key, only in (("strategy", strategy), ("group_size", form.columns)):
        if weights.get(key) != only:
            refuse(source, f"{form.value} weights with {key} {shown(weights.get(key))}")
    if weights.get("symmetric") is False or weights.get("actorder"):
        refuse(source, "compressed-tensors with zero points or actorder")
    return Fp4Scheme(form, found.left_out, divides=form is WeightFormat.NVFP4)


def _share(weights: ConfigReader, source: str) -> ScaleShare:
    strategy, block = weights.get("strategy"), weights.items("block_structure")
    try:
        share = ScaleShare(strategy)
    except ValueError:
        refuse(source, f"compressed-tensors with strategy {shown(strategy)}")
    if share is ScaleShare.BLOCK and block != _BLOCK:
        refuse(source, f"compressed-tensors with block_structure {shown(block or None)}")
    return share
