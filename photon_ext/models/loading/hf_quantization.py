"""Quantization from the `quantization_config` of a Hugging Face config.json.

Two schemes are read: quant_method "fp8" (Qwen3-FP8, DeepSeek) with blocks of 128 x 128, and
compressed-tensors' "float-quantized", with scales of a matrix, of rows, or of such blocks.
Everything else is refused by name, because the numbers would be others. What a scheme does to
activations is no reason to refuse it: they stay in the dtype of the model, which is more exact, and
the scales that a static scheme stores for them (`input_scale`) are not read.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from photon_ext.errors import ModelError, shown
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.quantization import SCALE_BLOCK, Quantization, ScaleShare

ACTIVATION_SCALE = "input_scale"
_READABLE = (
    'readable are plain weights, GGUF files, quant_method "fp8" with weight_block_size [128, 128], '
    'and "compressed-tensors" with format "float-quantized" (fp8 weights; strategy "tensor", '
    '"channel" or "block")'
)
_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_HEAD = "lm_head"


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
        return _compressed_tensors(config, source)
    _refuse(source, f"quant_method {shown(method)}")


def _blocks_of_fp8(config: ConfigReader, source: str) -> Quantization:
    block = config.items("weight_block_size")
    if block != _BLOCK:
        _refuse(source, f"fp8 weights with weight_block_size {shown(block or None)}")
    for key, only in (("fmt", "e4m3"), ("scale_fmt", "float")):
        if config.get(key) not in (None, only):
            _refuse(source, f"fp8 weights with {key} {shown(config.get(key))}")
    if config.items("modules_to_convert"):
        _refuse(source, f"fp8 modules_to_convert {shown(config.items('modules_to_convert'))}")
    key = "modules_to_not_convert" if config.has("modules_to_not_convert") else "ignored_layers"
    names = _names(config, key)
    # transformers takes a name for an expression of a module and what is below it, or for the end
    # of one; without names it leaves out the head
    patterns = [f"(?:{name})(?:\\..*)?|(?:.*\\.)?{re.escape(name)}" for name in names or [_HEAD]]
    return Quantization(ScaleShare.BLOCK, "weight_scale_inv", _checked(patterns, key, source))


def _compressed_tensors(config: ConfigReader, source: str) -> Quantization:
    groups = config.object("config_groups")
    names = config.keys("config_groups")
    if groups is None or len(names) != 1:
        _refuse(
            source, f"compressed-tensors with config_groups {shown(names)}, more or less than one"
        )
    group = groups.object(names[0])
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        _refuse(source, f"compressed-tensors without weights in {names[0]}")
    found = group.get("format") or config.get("format")
    kind = weights.get("type"), weights.get("num_bits")
    if found != "float-quantized" or kind != ("float", 8):
        bits = f"{shown(kind[0])} of {shown(kind[1])} bits"
        _refuse(source, f"compressed-tensors with format {shown(found)} and weights of type {bits}")
    if group.items("targets") != ["Linear"]:
        _refuse(source, f"compressed-tensors with targets {shown(group.items('targets'))}")
    if weights.get("symmetric") is False or weights.get("actorder"):
        _refuse(source, "compressed-tensors with zero points or actorder")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        other = config.object(key)
        if other is not None and other.get("format") != "dense":
            _refuse(source, f"compressed-tensors with {key}")
    ignored = _names(config, "ignore")
    patterns = [
        f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name) for name in ignored
    ]
    return Quantization(
        _share(weights, source), "weight_scale", _checked(patterns, "ignore", source)
    )


def _checked(patterns: list[str], key: str, source: str) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                f"{source}: quantization_config.{key} comes to {shown(pattern)}, which is no "
                f"regular expression ({error}); the file is damaged"
            ) from error
    return tuple(patterns)


def _share(weights: ConfigReader, source: str) -> ScaleShare:
    strategy, block = weights.get("strategy"), weights.items("block_structure")
    try:
        share = ScaleShare(strategy)
    except ValueError:
        _refuse(source, f"compressed-tensors with strategy {shown(strategy)}")
    if share is ScaleShare.BLOCK and block != _BLOCK:
        _refuse(source, f"compressed-tensors with block_structure {shown(block or None)}")
    return share


def _names(config: ConfigReader, key: str) -> list[str]:
    names: list[Any] = config.items(key)
    if not all(isinstance(name, str) for name in names):
        config.refuse(key, "a list of names")
    return names


def _refuse(source: str, what: str) -> NoReturn:
    raise ModelError(f"{source}: the weights are stored as {what}, which is not read; {_READABLE}")
