"""Weights of mxfp4 and nvfp4 as compressed-tensors stores them, written byte by byte in plain
Python.

The layout is that of https://github.com/vllm-project/compressed-tensors (nvfp4, mxfp4), the numbers
those of the OCP specification of microscaling formats and of fp8.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from photon_ext.weight_format import WeightFormat
from tests.models import stored_int4
from tests.models.stored_fp8 import FP8, LINEARS
from tests.models.tiny import saved_random_model

MXFP4, NVFP4 = WeightFormat.MXFP4, WeightFormat.NVFP4
BLOCK = {MXFP4: 32, NVFP4: 16}  # columns


class Fp4(NamedTuple):
    """A weight [n, k].

    Attributes:
        codes: [n][k] of four bits.
        scales: [n][blocks of a row] of eight bits.
        divisor: of all scales; of MXFP4 there is none.
    """

    form: WeightFormat
    codes: list[list[int]]
    scales: list[list[int]]
    divisor: float = 1.0


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


def e4m3(bits: int) -> float:
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if sign else size


def numbers(weight: Fp4) -> torch.Tensor:
    """float32 [n, k]: the scale is divided and rounded, and then their product is."""
    wide = [2.0 ** (bits - 127) if weight.form is MXFP4 else e4m3(bits) for bits in range(255)]
    scales = np.array(wide, dtype=np.float32)[np.array(weight.scales)]
    four = np.array([e2m1(code) for code in range(16)], dtype=np.float32)
    factors = scales / np.float32(weight.divisor)
    columns = four[np.array(weight.codes)]
    return torch.from_numpy(columns * factors.repeat(BLOCK[weight.form], axis=1))


def random_fp4(form: WeightFormat, n: int, k: int) -> Fp4:
    """Numbers of any code, by scales that are finite and not too large."""
    chance = random.Random(n * k)
    codes = [[chance.randrange(16) for _ in range(k)] for _ in range(n)]
    bounds = (90, 140) if form is MXFP4 else (0, 127)
    blocks = k // BLOCK[form]
    scales = [[chance.randrange(*bounds) for _ in range(blocks)] for _ in range(n)]
    return Fp4(form, codes, scales, 1.0 if form is MXFP4 else 1234.5)


def rounded(form: WeightFormat, weight: torch.Tensor) -> Fp4:
    """The nearest numbers to those of a weight; 6 is the largest of each block, or near it."""
    blocks = weight.float().unflatten(1, (-1, BLOCK[form]))
    scale, divisor = blocks.abs().amax(-1) / 6, 1.0
    if form is MXFP4:
        stored = (scale.log2().round() + 127).to(torch.uint8)
        wide = torch.exp2(stored.double() - 127)
    else:
        divisor = float(448 / scale.max())
        eight = (scale * divisor).clamp(max=448).to(FP8)
        stored, wide = eight.view(torch.uint8), eight.double() / divisor
    table = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    distance = (blocks.double() / wide[..., None]).unsqueeze(-1) - table
    codes = distance.abs().argmin(-1).flatten(1)
    return Fp4(form, codes.tolist(), stored.tolist(), float(np.float32(divisor)))


def stored(weight: Fp4) -> dict[str, torch.Tensor]:
    """The tensors of a module, by the last part of their names."""
    packed = [
        [low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)]
        for row in weight.codes
    ]
    scale = torch.tensor(weight.scales, dtype=torch.uint8)
    tensors = {
        "weight_packed": torch.tensor(packed, dtype=torch.uint8),
        "weight_scale": scale if weight.form is MXFP4 else scale.view(FP8),
    }
    if weight.form is NVFP4:
        tensors["weight_global_scale"] = torch.tensor([weight.divisor], dtype=torch.float32)
    return tensors


def compressed(
    form: WeightFormat,
    ignore: list[str] | None = None,
    fields: dict[str, Any] | None = None,
    **weights: Any,
) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    scheme = {
        "group_size": BLOCK[form],
        "strategy": "group" if form is MXFP4 else "tensor_group",
        "type": "float",
        "scale_dtype": "torch.uint8" if form is MXFP4 else "torch.float8_e4m3fn",
        **weights,
    }
    named = {"format": f"{form.value}-pack-quantized", **(fields or {})}
    return stored_int4.compressed(ignore, named, **scheme)


def store_fp4(
    values: dict[str, Any],
    folder: Path,
    form: WeightFormat,
    config: dict[str, Any] | None = None,
    small: str = "no module",
) -> Path:
    """A random model in folder / "fp4", its head plain, and its numbers in folder / "plain". Of
    modules whose names hold `small` weights are a hundredth as large.
    """
    saved_random_model(values, folder / "plain")
    dense = load_file(folder / "plain" / "model.safetensors")
    tensors = dict(dense)
    for name, weight in list(dense.items()):
        if LINEARS.fullmatch(name) and "lm_head" not in name:
            module = name.removesuffix(".weight")
            fp4 = rounded(form, 0.01 * weight if small in name else weight)
            dense[name] = numbers(fp4)
            del tensors[name]
            tensors |= {f"{module}.{last}": one for last, one in stored(fp4).items()}
    (folder / "fp4").mkdir()
    save_file(dense, folder / "plain" / "model.safetensors")
    save_file(tensors, folder / "fp4" / "model.safetensors")
    given = json.loads((folder / "plain" / "config.json").read_text())
    given["quantization_config"] = config or compressed(form)
    (folder / "fp4" / "config.json").write_text(json.dumps(given))
    return folder / "fp4"
