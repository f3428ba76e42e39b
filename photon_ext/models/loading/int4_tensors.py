"""Weights of four bits, from the tensors that a checkpoint stores for a module.

A number is (bits - zero) * scale. Files hold eight codes in an int32, the first in the lowest bits:

- GPTQ: `qweight` [k / 8, n] of eight columns, `qzeros` [groups, n / 8] of eight outputs, less 1
  each, `scales` [groups, n] and `g_idx` [k], the group of each column. In its second version zero
  points are stored as they are. In the first GPTQModel subtracts from the int32 as a whole, so that
  a zero point of 0 borrows from the next; files are read so. AutoGPTQ's kernels add 1 to each of
  the eight by itself, which differs where one of them is 0.
  https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py
  https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py
- AWQ: `qweight` [k, n / 8] and `qzeros` [groups, n / 8] of eight outputs in the order 0, 2, 4, 6,
  1, 3, 5, 7, and `scales` [groups, n].
  https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py
- compressed-tensors: `weight_packed` [n, k / 8] of eight columns, `weight_scale` [n, groups],
  `weight_shape`, which is n and k, and `weight_zero_point` [n / 8, groups] of eight outputs. Codes
  and zero points are signed there, and stored with 8 added to both.
  https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from photon_ext.errors import ModelError
from photon_ext.models.loading.expected import AGAIN, DAMAGED, Expected
from photon_ext.models.loading.int4_config import GROUP_STEP, Int4Scheme, Layout

_CODES = 8  # in an int32
_WORDS, _INTEGERS = ("I32",), ("I32", "I64")  # dtypes, as safetensors calls them
_DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_HALVES = (torch.float16, torch.bfloat16)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs whose codes an int32 holds, lowest bits first
_ONES = 0x11111111  # each code 1
_EIGHTS = 0x88888888 - 2**32  # each code 8, in an int32
_MOST = 15  # of the magnitude of bits - zero
_REMEDIES = {  # for zero points where there should be none
    Layout.GPTQ: 'if the file is right, set sym there to false, or checkpoint_format to "gptq_v2"',
    Layout.GPTQ_V2: 'if the file is right, set sym there to false, or checkpoint_format to "gptq"',
    Layout.AWQ: "if the file is right, set zero_point there to true",
}


class Int4Tensors(NamedTuple):
    """A weight [n, k].

    Attributes:
        data: uint8 [n, k / 2]: the low four bits of a byte are an even column, the high ones the
            next.
        scale: [n, groups] of float16 or bfloat16, as in the file, or else of float32.
        zero: uint8 [n, groups]; None: 8.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


def expected(scheme: Int4Scheme, module: str, n: int, k: int) -> dict[str, Expected]:
    """The tensors that files must have for a module [n, k], by name. ModelError: no file stores
    one of this size by this scheme.
    """
    groups = _groups(scheme, module, k)
    if scheme.layout is Layout.COMPRESSED:
        found = {
            "weight_packed": Expected((n, k // _CODES), _WORDS),
            "weight_scale": Expected((n, groups)),
            "weight_shape": Expected((2,), _INTEGERS),
        }
        if scheme.zeros:
            found["weight_zero_point"] = Expected((-(-n // _CODES), groups), _WORDS)
    else:
        if n % _CODES:
            raise ModelError(
                f"{module} has {n} outputs, and {scheme.layout.value} stores multiples of "
                f"{_CODES}; use a checkpoint that leaves this module out"
            )
        columns_first = scheme.layout is Layout.AWQ
        found = {
            "qweight": Expected((k, n // _CODES) if columns_first else (k // _CODES, n), _WORDS),
            "qzeros": Expected((groups, n // _CODES), _WORDS),
            "scales": Expected((groups, n)),
        }
        if not columns_first:
            found["g_idx"] = Expected((k,), _INTEGERS)
    return {f"{module}.{name}": one for name, one in found.items()}


def unpacked(
    scheme: Int4Scheme, tensors: Mapping[str, torch.Tensor], path: Path, module: str
) -> Int4Tensors:
    """Of the tensors that `expected` names, by the last part of their names; `path` and `module`
    are what messages name. What lies right already is not copied.

    ModelError: shapes or dtypes do not belong together, a scale is not finite or too large for
    numbers in float32, the columns of a group lie apart (desc_act), or there are zero points and
    the scheme says that there are none.
    """
    stored = _Stored(path, module, scheme, tensors)
    stored.check()
    if scheme.layout is Layout.COMPRESSED:
        return _compressed(stored)
    scale, zero = stored.scale("scales").t().contiguous(), _zero_of_outputs(stored)
    words = tensors["qweight"]
    data = _awq_data(words) if scheme.layout is Layout.AWQ else _bytes(words.t())
    return Int4Tensors(data, scale, zero)


class _Stored(NamedTuple):
    """The tensors of one module."""

    path: Path
    module: str
    scheme: Int4Scheme
    tensors: Mapping[str, torch.Tensor]

    def refuse(self, name: str, what: str, remedy: str = AGAIN) -> NoReturn:
        raise ModelError(f"{self.path}: {self.module}.{name} {what}; {remedy}")

    def check(self) -> None:
        """All tensors are there, and fit each other and the scheme."""
        n, k = self._size()
        wanted = {
            name.rpartition(".")[2]: one
            for name, one in expected(self.scheme, self.module, n, k).items()
        }
        for name, one in wanted.items():
            if name not in self.tensors:
                self.refuse(name, "is missing")
            tensor = self.tensors[name]
            if not one.has(list(tensor.shape)):
                size = f"a weight [{n}, {k}] in groups of {self.scheme.group or k} columns"
                self.refuse(
                    name,
                    f"has shape {list(tensor.shape)}, and that of {size} is {list(one.shape)}",
                )
            dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
            if dtype not in one.dtypes:
                self.refuse(name, f"is stored as {dtype}, expected {' or '.join(one.dtypes)}")
        for name in sorted(self.tensors.keys() - wanted.keys()):
            self.refuse(name, "is not part of what config.json describes, and would be ignored")
        if "weight_shape" in wanted and self.tensors["weight_shape"].tolist() != [n, k]:
            said = self.tensors["weight_shape"].tolist()
            self.refuse("weight_shape", f"is {said}, and weight_packed holds [{n}, {k}]")
        if "g_idx" in wanted:
            self._check_order(k)

    def scale(self, name: str) -> torch.Tensor:
        """As it lies in the file, in its 16-bit dtype or float32."""
        stored = self.tensors[name]
        scale = stored if stored.dtype in _HALVES else stored.float()
        finite = (scale.float() * _MOST).isfinite()
        if not bool(finite.all()):
            place = (~finite).nonzero()[0].tolist()
            found = float(stored[tuple(place)])
            self.refuse(
                name,
                f"is {found:g} at {place}, and numbers of a weight are finite in float32",
                DAMAGED,
            )
        return scale

    def _size(self) -> tuple[int, int]:
        """n and k, by the shape of the codes."""
        name = "weight_packed" if self.scheme.layout is Layout.COMPRESSED else "qweight"
        if name not in self.tensors:
            self.refuse(name, "is missing")
        shape = self.tensors[name].shape
        if len(shape) != 2:
            self.refuse(name, f"has shape {list(shape)}, expected two dimensions")
        if self.scheme.layout is Layout.COMPRESSED:
            return shape[0], shape[1] * _CODES
        if self.scheme.layout is Layout.AWQ:
            return shape[1] * _CODES, shape[0]
        return shape[1], shape[0] * _CODES

    def _check_order(self, k: int) -> None:
        found = self.tensors["g_idx"]
        wanted = torch.arange(k, device=found.device) // (self.scheme.group or k)
        if not torch.equal(found.long(), wanted):
            column = int((found != wanted).nonzero()[0])
            self.refuse(
                "g_idx",
                f"says that column {column} is in group {int(found[column])} and not in "
                f"{int(wanted[column])}: the columns of a group lie apart (desc_act)",
                "use a checkpoint made with desc_act false",
            )


def _groups(scheme: Int4Scheme, module: str, k: int) -> int:
    """Of a row of k columns."""
    size = scheme.group or k
    if k == 0 or size % GROUP_STEP or k % size:
        whole = f"multiples of {GROUP_STEP}" if scheme.group is None else f"whole groups of {size}"
        raise ModelError(
            f"{module} has {k} columns, and quantization_config of config.json asks for {whole}; "
            "use a checkpoint with smaller groups, or one that leaves this module out"
        )
    return k // size


def _compressed(stored: _Stored) -> Int4Tensors:
    data, scale = _bytes(stored.tensors["weight_packed"]), stored.scale("weight_scale").contiguous()
    if not stored.scheme.zeros:
        return Int4Tensors(data, scale, None)
    codes = _codes(stored.tensors["weight_zero_point"].t()).flatten(1)
    return Int4Tensors(data, scale, codes[:, : len(data)].t().contiguous())


def _zero_of_outputs(stored: _Stored) -> torch.Tensor | None:
    """[n, groups] of `qzeros`."""
    words = stored.tensors["qzeros"]
    if stored.scheme.layout is Layout.GPTQ:
        # the writers subtract from the int32 as a whole: a zero point of 0 borrows from the next
        words = words + _ONES
    if not stored.scheme.zeros:
        if not bool((words == _EIGHTS).all()):
            stored.refuse(
                "qzeros",
                "has zero points other than 8, and quantization_config of config.json says that "
                "there are none",
                _REMEDIES[stored.scheme.layout],
            )
        return None
    codes = _codes(words)
    if stored.scheme.layout is Layout.AWQ:
        codes = codes[..., [_AWQ_ORDER.index(output) for output in range(_CODES)]]
    return codes.flatten(1).t().contiguous()


def _awq_data(words: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k / 2] of int32 [k, n / 8]."""
    columns, eights = words.shape
    stored = _bytes(words.t()).view(eights, columns // 2, 2, _CODES // 2)
    data = stored.new_empty(eights, _CODES, columns // 2)
    for byte in range(_CODES // 2):
        even, odd = stored[..., byte].unbind(-1)  # columns
        low, high = _AWQ_ORDER[2 * byte : 2 * byte + 2]  # outputs
        data[:, low] = (even & 15) | (odd << 4)
        data[:, high] = (even >> 4) | (odd & 0xF0)
    return data.flatten(0, 1)


def _codes(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, words, 8] of int32 [rows, words]."""
    pairs = _bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), -1).view(*words.shape, _CODES)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 4 * words] of int32 [rows, words], the lowest first."""
    return words.contiguous().view(torch.uint8)
