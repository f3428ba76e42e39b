"""Embeddings in the place of tokens: what a prompt may bring along, and the way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from photon_ext.checks import as_index, is_array
from photon_ext.errors import ConfigError, RequestError, describe, shown

if TYPE_CHECKING:
    from photon_ext.models.vision import VisionEncoder
    from photon_ext.runtime.ports import RuntimePort

_KEY_BYTES = 8  # of a cryptographic hash: another embedding of a given key takes 2^63 tries


class PromptEmbeds(NamedTuple):
    """The embeddings of one prompt.

    Attributes:
        rows: [n, hidden], in host memory and the model's dtype; nobody changes them.
        positions: where each stands in the prompt, ascending.
        keys: a negative number for each that says its content: equal where the bits are.
    """

    rows: torch.Tensor
    positions: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, rows: torch.Tensor, positions: Sequence[int]) -> PromptEmbeds:
        """With their keys."""
        keys = (blake2b(row, digest_size=_KEY_BYTES) for row in rows.view(torch.uint8).numpy())
        numbers = (~(int.from_bytes(key.digest(), "little") >> 1) for key in keys)
        return cls(rows, tuple(positions), tuple(numbers))

    def keyed(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The prompt, with their keys where they stand."""
        keyed = list(prompt_ids)
        for position, key in zip(self.positions, self.keys, strict=True):
            keyed[position] = key
        return tuple(keyed)


class EmbedsMemory(NamedTuple):
    """The forward's memory for embeddings, [places, hidden]; None: it has none."""

    memory: torch.Tensor | None
    runtime: RuntimePort

    def write(self, place: int, rows: torch.Tensor) -> None:
        """Enqueues the copy of embeddings to the places from `place` on, which nobody has."""
        assert self.memory is not None
        self.runtime.upload(self.memory[place : place + len(rows)], rows)


class EmbedsReader(NamedTuple):
    """Checks what prompts bring along, on callers' threads. Requests keep it, so it does not hold
    the forward's memory.

    Attributes:
        places: embeddings that the forward's memory holds; 0: there is none.
        hidden, dtype: of the model.
        pinned: for a copy to a GPU.
        encoder: makes embeddings of images; None: prompts hold no images.
    """

    places: int = 0
    hidden: int = 0
    dtype: torch.dtype = torch.float32
    pinned: bool = False
    encoder: VisionEncoder | None = None

    @classmethod
    def of(cls, memory: torch.Tensor | None, encoder: VisionEncoder | None) -> EmbedsReader:
        """For the forward's memory. Raises ConfigError: the encoder is none, or its output has no
        place there.
        """
        if encoder is not None:
            _check_encoder(encoder)
        places, hidden = (0, 0) if memory is None else memory.shape
        if encoder is not None and places < encoder.config.tokens:
            raise ConfigError(
                f"embeds_tokens is {places}, and an image is {encoder.config.tokens} embeddings; "
                "make it that many at least"
            )
        if encoder is not None and hidden != encoder.config.hidden:
            raise ConfigError(
                f"the vision encoder makes embeddings of width {encoder.config.hidden}, and the "
                f"model's are {hidden} wide; give one that was made for this model"
            )
        if memory is None:
            return cls()
        return cls(places, hidden, memory.dtype, memory.is_cuda, encoder)

    def read(self, embeds: Any, taken: int = 0) -> torch.Tensor:
        """A copy in host memory, in the model's dtype. Raises RequestError: the engine takes none,
        these are no finite numbers of the model's width, or, with `taken` others of the prompt,
        they have no place.
        """
        if not self.places:
            raise RequestError(
                "the prompt holds embeddings, and this engine takes token ids alone; make it with "
                "embeds_tokens, the embeddings of all prompts that are read at once"
            )
        shape, dtype = shape_of(embeds), str(embeds.dtype).removeprefix("torch.")
        if not dtype.startswith(("float", "bfloat")):
            raise RequestError(
                f"the prompt's embeddings are of {dtype}; give float32, float16 or bfloat16"
            )
        if len(shape) != 2 or shape[0] == 0 or shape[1] != self.hidden:
            raise RequestError(
                f"the prompt's embeddings have shape {shown(shape)}; expected [n, "
                f"{self.hidden}], n of the model's hidden size, one at least"
            )
        if taken + shape[0] > self.places:
            raise RequestError(
                f"the prompt holds {taken + shape[0]} embeddings or more, and the engine has "
                f"{self.places} places; give fewer, or make it with more embeds_tokens"
            )
        rows = _on_host(embeds, self.dtype)
        if not (finite := rows.isfinite().all(dim=1)).all():
            bad = int((~finite).nonzero()[0])
            raise RequestError(
                f"embedding {bad} of {shape[0]} of the prompt holds NaN or infinity in "
                f"{str(self.dtype).removeprefix('torch.')}; give finite numbers"
            )
        return rows

    def read_image(self, image: Any) -> torch.Tensor:
        """The embeddings of an image, [n, hidden], as the encoder gives them. Raises RequestError:
        there is no encoder, it does not take this image, or it gives no array.
        """
        if self.encoder is None:
            raise RequestError(
                "the prompt holds an image, and this engine has no vision encoder; make it with "
                "vision=, or give embeddings"
            )
        embeds = self.encoder.encode(image)
        if not is_array(embeds):
            raise RequestError(
                f"encode() of the vision encoder returned {shown(embeds)}; it must return a tensor "
                f"[n, {self.hidden}]"
            )
        return embeds

    def gathered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `read` has given, as one tensor that can be written."""
        rows = torch.cat(list(parts))
        return rows.pin_memory() if self.pinned else rows


NO_EMBEDS = EmbedsReader()


def shape_of(array: Any) -> tuple[int, ...]:
    """Of what `is_array`. Raises RequestError: it has none."""
    try:
        return tuple(array.shape)
    except RuntimeError as error:  # of a nested tensor
        raise RequestError(
            f"the prompt's tensor has no shape ({describe(error)}); give a dense tensor"
        ) from error


def _check_encoder(encoder: object) -> None:
    config = getattr(encoder, "config", None)
    sizes = [as_index(getattr(config, name, None)) for name in ("hidden", "tokens")]
    if None in sizes or not callable(getattr(encoder, "encode", None)):
        raise ConfigError(
            f"vision is {shown(encoder)}; give a VisionEncoder, or an object with encode and a "
            "config of hidden and tokens"
        )


def _on_host(embeds: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy: the caller may go on to change what was given."""
    try:
        if not isinstance(embeds, torch.Tensor):
            embeds = torch.from_numpy(embeds.copy())  # strides may be negative, memory read-only
        return embeds.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()  # type: ignore[no-any-return]
    except (RuntimeError, TypeError) as error:  # without memory, or of a layout that is no array
        raise RequestError(
            f"the prompt's embeddings cannot be read ({describe(error)}); give a dense tensor"
        ) from error
