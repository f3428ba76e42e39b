"""What all readers of a `quantization_config` need: refusals, names of modules, and the fields
around the weights that compressed-tensors has whatever their format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from photon_ext.errors import ModelError, shown
from photon_ext.models.loading.config_reader import ConfigReader

HEAD = "lm_head"
_MOST_REPEATS = 5  # of a pattern; time grows with the length of a name to this power
_MOST_CHOICES = 1024  # the product of alternatives, of which what is optional has two
# A character that is quoted, a class of characters, or what groups and repeats are made of; what
# follows a parenthesis, and a repeat that takes as little as it can, are no option.
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[*+?]\??|[)|{]", re.DOTALL)
_READABLE = (
    'readable are plain weights, GGUF files, quant_method "fp8" with weight_block_size [128, 128], '
    '"gptq" (bits 4, desc_act false) and "awq" (bits 4, version "gemm") with a group_size of a '
    'multiple of 32 or -1, and "compressed-tensors" with format "float-quantized" (fp8; strategy '
    '"tensor", "channel" or "block"), "pack-quantized" (int4; strategy "group" or "channel"), '
    '"mxfp4-pack-quantized" or "nvfp4-pack-quantized"'
)


class CompressedWeights(NamedTuple):
    """What compressed-tensors says of the weights.

    Attributes:
        format: of the files, such as "pack-quantized"; as it stands there, and so maybe no text.
        weights: the fields of their scheme.
        left_out: modules that are stored plain: regular expressions that match the whole of their
            names.
    """

    format: Any
    weights: ConfigReader
    left_out: tuple[str, ...]

    @property
    def title(self) -> str:
        """As a refusal names it."""
        bits = f"{shown(self.weights.get('type'))} of {shown(self.weights.get('num_bits'))} bits"
        return f"compressed-tensors with format {shown(self.format)} and weights of type {bits}"


def compressed_weights(config: ConfigReader, source: str) -> CompressedWeights:
    """Of a `quantization_config`. ModelError: not all linears are stored alike, or more than
    weights is. A kv_cache_scheme in fp8 changes no weight: keys and values are what the engine is
    asked for (`kv_dtype`), with scales of its own.
    """
    names = config.keys("config_groups")
    groups = config.object("config_groups")
    if groups is None or len(names) != 1:
        refuse(
            source, f"compressed-tensors with config_groups {shown(names)}, more or less than one"
        )
    group = groups.object(names[0])
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        refuse(source, f"compressed-tensors without weights in {names[0]}")
    if group.items("targets") != ["Linear"]:
        refuse(source, f"compressed-tensors with targets {shown(group.items('targets'))}")
    sparsity = config.object("sparsity_config")
    if sparsity is not None and sparsity.get("format") != "dense":
        refuse(source, "compressed-tensors with sparsity_config")
    if config.object("transform_config") is not None:
        refuse(source, "compressed-tensors with transform_config")
    cache = config.object("kv_cache_scheme")
    if cache is not None and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
        refuse(source, "compressed-tensors with a kv_cache_scheme of another type than float8")
    patterns = [
        f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name)
        for name in module_names(config, "ignore")
    ]
    left_out = expressions(patterns, "ignore", source)
    return CompressedWeights(group.get("format") or config.get("format"), weights, left_out)


def module_names(config: ConfigReader, key: str) -> list[str]:
    """A list of texts; empty where the key is absent."""
    names = config.items(key)
    if not all(isinstance(name, str) for name in names):
        config.refuse(key, "a list of names")
    return names


def expressions(patterns: Sequence[str], key: str, source: str) -> tuple[str, ...]:
    """The patterns that were made of the names of a key. ModelError: one is none, or may take hours
    to be matched.
    """
    for pattern in patterns:
        comes = f"{source}: quantization_config.{key} comes to {shown(pattern)}"
        if _may_take_long(pattern):
            raise ModelError(
                f"{comes}, whose repeats within repeats, more than {_MOST_REPEATS} of them, or "
                f"more than {_MOST_CHOICES} choices, may take hours to be matched; name the "
                "modules more plainly"
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(
                f"{comes}, which is no regular expression ({error}); the file is damaged"
            ) from error
    return tuple(patterns)


def _may_take_long(pattern: str) -> bool:
    """Whether a group that is repeated has repeats or alternatives itself, or repeats or choices
    are many. It looks at no more than that: what it does not understand, re refuses.
    """
    repeats, choices = [0], [1]  # of alternatives of the whole
    varies, branches = [False], [1]  # of open groups: whether they have either; their alternatives
    for match in _TOKENS.finditer(pattern):
        token = match.group()
        if token.startswith("("):
            varies.append(False)
            branches.append(1)
        elif token == ")" and len(varies) > 1:
            inner = varies.pop()
            varies[-1] |= inner
            choices[-1] *= branches.pop()
            if inner and pattern[match.end() :].startswith(("*", "+", "{")):
                return True
        elif token == "|":
            varies[-1] = True
            branches[-1] += 1
            if len(varies) == 1:
                repeats.append(0)
                choices.append(1)
        elif token[0] == "?":
            choices[-1], varies[-1] = choices[-1] * 2, True
        elif token[0] in "*+{":
            repeats[-1], varies[-1] = repeats[-1] + 1, True
    return max(repeats) > _MOST_REPEATS or max(choices) > _MOST_CHOICES


def refuse(source: str, what: str) -> NoReturn:
    """ModelError that names how weights are stored, and what can be read."""
    raise ModelError(f"{source}: the weights are stored as {what}, which is not read; {_READABLE}")
