"""GgufFile: the metadata and tensors of a GGUF file, through the `gguf` package."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import dequantize
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from photon_ext.errors import ModelError, shortened
from photon_ext.models.loading.expected import DAMAGED, PLAIN
from photon_ext.models.loading.gguf_reader import GgufReader
from photon_ext.models.text.text_files import check_regular
from photon_ext.weight_format import WeightFormat

if TYPE_CHECKING:
    import torch

    from photon_ext.weight import Weight

_MAGIC = b"GGUF"
_ROW_ELEMENTS = 2**14
_BLOCKS = {
    form.value: form
    for form in WeightFormat
    if form is not WeightFormat.DENSE and not form.has_scales
}


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: where it is.
        fields: metadata by key; arrays are lists, strings are str.
        tensor_names: names of all tensors.
    """

    def __init__(self, path: Path) -> None:
        """Opens and maps the file.

        Raises ModelError, naming it, where it is missing, damaged or not GGUF.
        """
        self.path = path
        check_regular(path)
        try:
            with path.open("rb") as file:
                magic, version = file.read(len(_MAGIC)), file.read(4)
        except OSError as error:
            raise ModelError(
                f"{path}: cannot be read ({error.strerror}); expected a GGUF file"
            ) from error
        if magic != _MAGIC:
            raise ModelError(
                f"{path}: starts with {magic!r}, expected {_MAGIC!r}; this is not a GGUF file"
            )
        self._check_version(version)
        try:
            reader = GgufReader(path)
            self.fields: Mapping[str, Any] = reader.metadata()
        except (
            Exception
        ) as error:  # the reader indexes its memory map: damage shows as whatever numpy raises
            size = path.stat().st_size
            raise ModelError(
                f"{path}: damaged or cut short at {size} bytes ({shortened(str(error))}); download "
                "it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._swapped = reader.byte_order == "S"

    def _check_version(self, version: bytes) -> None:
        """Raises ModelError for a version that the package does not read, in either order of bytes.

        Too few bytes are damage.
        """
        numbers = [int.from_bytes(version, order) for order in ("little", "big")]
        known = READER_SUPPORTED_VERSIONS
        if len(version) == 4 and not any(number in known for number in numbers):
            raise ModelError(
                f"{self.path}: GGUF version {numbers[0]}, but gguf reads {list(known)}; convert "
                "the model again, or update gguf"
            )

    @property
    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost dimension first. KeyError: there is no such tensor."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def format(self, name: str) -> WeightFormat | None:
        """That of a tensor whose blocks kernels read; None: of any other. KeyError: there is no
        such tensor.
        """
        return _BLOCKS.get(self._tensors[name].tensor_type.name.lower())

    def weight(self, name: str) -> Weight:
        """A matrix as it is stored; one of other blocks, and of plain numbers, in float32. From any
        thread; it raises as :meth:`tensor` does.
        """
        import torch

        from photon_ext.block_codes import has_finite_scales
        from photon_ext.weight import Weight

        form, stored = self.format(name), self._tensor(name)
        if form is None:
            values = self.tensor(name)
            if stored.tensor_type.name not in PLAIN and not bool(values.isfinite().all()):
                raise ModelError(f"{self.path}: {name} has numbers that are not finite; {DAMAGED}")
            return Weight(values)
        # read, not mapped: pages of the file beside the weights would take the memory twice
        data = np.fromfile(self.path, np.uint8, int(stored.n_bytes), offset=int(stored.data_offset))
        weight = Weight(torch.from_numpy(data).view(self.shape(name)[0], -1), form)
        if not has_finite_scales(weight):
            raise ModelError(f"{self.path}: {name} has scales that are not finite; {DAMAGED}")
        return weight

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in float32 on the CPU, outermost dimension first; from any thread.

        Raises:
            KeyError: there is no such tensor.
            ModelError: the gguf package cannot dequantize it, or the file is of the other order of
                bytes.
        """
        import torch  # whoever reads the metadata alone, of a tokenizer, does without

        stored = self._tensor(name)
        try:
            values = dequantize(_in_long_rows(stored), stored.tensor_type)
        except NotImplementedError as error:
            kind = stored.tensor_type.name
            raise ModelError(
                f"{self.path}: {name} is quantized as {kind}, which the gguf package cannot read; "
                "use another file"
            ) from error
        if not (values.flags.owndata and values.flags.writeable):
            values = values.copy()  # float32 tensors come as a read-only view of the file
        return torch.from_numpy(values).view(self.shape(name))

    def _tensor(self, name: str) -> Any:
        if self._swapped:  # the package reads its metadata right, and its tensors as they lie
            raise ModelError(
                f"{self.path}: its numbers have the bytes of another kind of processor "
                f"(this one is {sys.byteorder}-endian); convert the model again for this one"
            )
        return self._tensors[name]


def _in_long_rows(stored: Any) -> Any:
    """A quantized tensor's bytes, several of its rows in one: the package goes through 16 rows at a
    time, which costs more than the work itself where they are short.
    """
    data = stored.data
    if data.dtype != np.uint8 or data.ndim != 2:
        return data
    rows = data.shape[0]
    most = max(_ROW_ELEMENTS * rows // int(stored.n_elements), 1)
    together = next(count for count in range(most, 0, -1) if rows % count == 0)
    return data.reshape(rows // together, -1)
