"""GgufReader: the gguf package's reader, for files that nobody vouches for.

The package believes the counts, lengths and offsets that a file states. Here each is held against
what the file can hold before it is used, and the tensors must lie as llama.cpp asks for it: in the
order of their descriptions, without gaps or overlaps. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import sys
from struct import Struct
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from photon_ext.errors import shown
from photon_ext.models.loading.config_reader import MAX_SIZE

_MAX_DIMS = 4  # of ggml
_MAX_ALIGNMENT = 2**16  # of a page of memory, at most; files use 32
# Bytes that one entry takes at the least: lengths, types and counts, with names and values that are
# empty.
_KEY_BYTES, _TENSOR_BYTES, _STRING_BYTES, _ARRAY_BYTES = 13, 24, 8, 12


class GgufReader(GGUFReader):  # type: ignore[misc]
    """Raises ValueError, naming what is wrong, or whatever numpy makes of damage."""

    data: Any

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """`count` elements at `offset`, over a plain array.

        Slices of numpy's memmap are as slow as all the rest.
        """
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        self._check_count("elements", int(count), offset, np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, override_order)

    def metadata(self) -> dict[str, Any]:
        """Values by key: numbers, texts, and lists of either."""
        return {key: _value(field) for key, field in self.fields.items()}

    def _check_count(self, what: str, count: int, offset: int, least: int) -> None:
        """Refuses a count of entries, of `least` bytes each, that the file has no room for."""
        most = max(len(self.data) - offset, 0) // least
        if count > most:
            raise ValueError(f"{count} {what} at byte {offset}, where the file has room for {most}")

    def _build_fields(self, offs: int, count: int) -> int:
        self._check_count("metadata keys", int(count), offs, _KEY_BYTES)
        return int(super()._build_fields(offs, count))

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        self._check_count("tensors", int(count), offs, _TENSOR_BYTES)
        end, tensors = super()._build_tensor_info(offs, count)
        return int(end), tensors

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, element = orig_offs + _ARRAY_BYTES, GGUFValueType(kind[0])
        dtype = self.gguf_scalar_to_np.get(element)
        if dtype is None:
            least = _STRING_BYTES if element is GGUFValueType.STRING else _ARRAY_BYTES
        else:
            least = np.dtype(dtype).itemsize
        self._check_count(f"elements ({element.name}) of an array", int(count[0]), start, least)
        if count[0] > MAX_SIZE:
            raise ValueError(
                f"{count[0]} elements of an array at byte {start}, expected up to {MAX_SIZE}"
            )
        if element is GGUFValueType.STRING:
            size, texts = self._texts(start, int(count[0]))
            return _ARRAY_BYTES + size, [kind, count, texts], [2], [GGUFValueType.ARRAY, element]
        if dtype is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(
            start, dtype, count[0]
        )  # at once: the package makes a part of each element
        return (
            _ARRAY_BYTES + values.nbytes,
            [kind, count, values],
            [2],
            [GGUFValueType.ARRAY, element],
        )

    def _texts(self, start: int, count: int) -> tuple[int, list[str]]:
        """Bytes of an array of texts, and the texts. The package takes seconds for the hundred
        thousand of a vocabulary; views of their bytes would be as many objects for the garbage
        collector to follow.
        """
        memory, swapped = memoryview(self.data), self.byte_order == "S"
        length = Struct(">Q" if swapped == (sys.byteorder == "little") else "<Q").unpack_from
        texts, begin = [], start
        try:
            for _ in range(count):
                if begin + _STRING_BYTES > len(memory):
                    self._check_count("bytes of a length", _STRING_BYTES, begin, 1)
                (size,) = length(memory, begin)
                begin += _STRING_BYTES
                end = begin + size
                if end > len(memory):
                    self._check_count("bytes of a text", size, begin, 1)
                texts.append(str(memory[begin:end], "utf-8"))
                begin = end
        except UnicodeDecodeError as error:
            raise ValueError(f"text {len(texts)} of an array, at byte {begin}: {error}") from error
        return begin - start, texts

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        if self.alignment > _MAX_ALIGNMENT:
            raise ValueError(
                f"general.alignment is {self.alignment}, expected up to {_MAX_ALIGNMENT}"
            )
        end = expected = 0
        for field in fields:
            offset, name = int(field.parts[5][0]), shown(field.name)
            if offset != expected:
                raise ValueError(
                    f"tensor {name}: offset is {offset}, expected {expected}, the padded end of "
                    "the tensor before"
                )
            end = offset + _tensor_bytes(field, name)
            if start_offs + end > len(self.data):
                raise ValueError(
                    f"tensor {name}: ends at byte {start_offs + end}, the file at {len(self.data)}"
                )
            expected = -(-end // int(self.alignment)) * int(self.alignment)
        rest = len(self.data) - start_offs - end
        if rest >= self.alignment:
            raise ValueError(
                f"{rest} bytes follow the last tensor, expected less than {self.alignment}, the "
                "alignment"
            )
        super()._build_tensors(start_offs, fields)


def _value(field: ReaderField) -> Any:
    """Arrays of arrays come flat, as the package has them."""
    if field.types[0] is GGUFValueType.ARRAY and field.types[-1] is GGUFValueType.STRING:
        return [text for place in field.data for text in field.parts[place]]
    return field.contents()


def _tensor_bytes(field: ReaderField, name: str) -> int:
    """Bytes of a tensor by its sizes and type; both are checked."""
    sizes, raw_type = field.parts[3].tolist(), int(field.parts[4][0])
    if not 1 <= len(sizes) <= _MAX_DIMS or not all(1 <= size <= 2**63 for size in sizes):
        raise ValueError(
            f"tensor {name}: sizes are {shown(sizes)}, expected one to {_MAX_DIMS} positive numbers"
        )
    if raw_type not in GGMLQuantizationType._value2member_map_:
        raise ValueError(f"tensor {name}: type is {raw_type}, which the gguf package does not know")
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type)]
    if sizes[0] % per_block:
        raise ValueError(
            f"tensor {name}: rows of {sizes[0]} elements, expected a multiple of {per_block}, "
            f"the block of {GGMLQuantizationType(raw_type).name}"
        )
    return int(math.prod(sizes) // per_block * block_bytes)
