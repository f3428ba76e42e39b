"""Weights of four bits as other libraries store them, written code by code in plain Python.

The layouts are those of
https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py,
of https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py (zero points of the
first version), of https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py and
of https://github.com/vllm-project/compressed-tensors (pack_quantized).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from photon_ext.models.loading.int4_config import Layout

Rows = Sequence[Sequence[int]]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Codes(NamedTuple):
    """A weight [n, k]: the number at (row, column) is (codes - zeros of its group) * scale."""

    codes: Rows
    zeros: Rows
    scale: torch.Tensor

    @property
    def group(self) -> int:
        """Columns."""
        return len(self.codes[0]) // len(self.zeros[0])


def random_codes(n: int, k: int, groups: int, zeros: bool, dtype: torch.dtype) -> Codes:
    """Without zero points these are 8."""
    chance = random.Random(n * k + groups)
    codes = [[chance.randrange(16) for _ in range(k)] for _ in range(n)]
    points = [[chance.randrange(16) if zeros else 8 for _ in range(groups)] for _ in range(n)]
    scale = torch.randn(n, groups, generator=torch.Generator().manual_seed(n)).to(dtype)
    return Codes(codes, points, scale)


def stored(layout: Layout, weight: Codes) -> dict[str, torch.Tensor]:
    """The tensors of a module, by the last part of their names."""
    if layout is Layout.COMPRESSED:
        return _compressed(weight)
    if layout is Layout.AWQ:
        return _awq(weight)
    return _gptq(weight, minus=1 if layout is Layout.GPTQ else 0)


def words(rows: Rows) -> torch.Tensor:
    """int32 of numbers below 2^32."""
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int32)


def word(codes: Sequence[int]) -> int:
    """Of eight codes, the first in the lowest bits."""
    assert len(codes) == 8
    return sum(code << 4 * place for place, code in enumerate(codes))


def turned(rows: Rows) -> Rows:
    """Columns as rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def packed(rows: Rows, order: Sequence[int] = range(8)) -> Rows:
    """Each eight codes of a row as one word, in this order."""
    return [
        [word([row[at + place] for place in order]) for at in range(0, len(row), 8)] for row in rows
    ]


def _gptq(weight: Codes, minus: int) -> dict[str, torch.Tensor]:
    zeros = packed(turned(weight.zeros))
    less = [[(one - minus * 0x11111111) % 2**32 for one in row] for row in zeros]
    return {
        "qweight": words(turned(packed(weight.codes))),
        "qzeros": words(less),
        "scales": weight.scale.t().contiguous(),
        "g_idx": torch.tensor(
            [column // weight.group for column in range(len(weight.codes[0]))], dtype=torch.int32
        ),
    }


def _awq(weight: Codes) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(packed(turned(weight.codes), AWQ_ORDER)),
        "qzeros": words(packed(turned(weight.zeros), AWQ_ORDER)),
        "scales": weight.scale.t().contiguous(),
    }


def _compressed(weight: Codes) -> dict[str, torch.Tensor]:
    n, k = len(weight.codes), len(weight.codes[0])
    tensors = {
        "weight_packed": words(packed(weight.codes)),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if any(zero != 8 for row in weight.zeros for zero in row):
        filled = [*weight.zeros, *[[0] * len(weight.zeros[0])] * (-n % 8)]
        tensors["weight_zero_point"] = words(turned(packed(turned(filled))))
    return tensors


def gptq(**fields: Any) -> dict[str, Any]:
    """A `quantization_config` as AutoGPTQ and transformers write it."""
    return {
        "bits": 4,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "group_size": 128,
        "modules_in_block_to_quantize": None,
        "quant_method": "gptq",
        "sym": True,
        "true_sequential": True,
        **fields,
    }


def awq(**fields: Any) -> dict[str, Any]:
    """A `quantization_config` as AutoAWQ writes it."""
    return {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
        **fields,
    }


def compressed(
    ignore: list[str] | None = None, fields: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    scheme = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 128,
        "num_bits": 4,
        "observer": "minmax",
        "strategy": "group",
        "symmetric": True,
        "type": "int",
        **weights,
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": scheme,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **(fields or {}),
    }
