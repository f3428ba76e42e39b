"""Images: decoded, checked, and cut into the crops that a vision encoder sees."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from photon_ext.checks import is_array
from photon_ext.errors import RequestError, describe, shown

if TYPE_CHECKING:
    from PIL.Image import Image

    from photon_ext.models.vision import VisionConfig

MOST_PIXELS = 2**26  # of an image: as numbers it takes 768 MiB
MOST_SIDE = 2**16  # scaling a longer one takes memory by its length
_MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr")  # 8 bits a colour
# files that Pillow decodes itself, to the size that their headers say: PostScript is neither
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
_EXPECTED = (
    f"give a PIL image, the bytes of a file ({', '.join(_FORMATS)}), or an array of uint8, "
    "[height, width, 3]"
)


class Crops(NamedTuple):
    """What the encoder sees of an image: float32 [1 + rows * columns, 3, size, size], from -1 to 1;
    the first is the whole image, the others are its tiles, row by row.
    """

    pixels: torch.Tensor
    rows: int
    columns: int


def read_image(image: Any) -> Image:
    """The image in RGB, turned as its camera says. Raises RequestError: it is none, is damaged, has
    no pixels or too many, or is of a kind whose colours do not fit 8 bits; or Pillow is missing.
    """
    try:
        from PIL import ImageOps
    except ImportError as error:
        raise RequestError("images need the Python package Pillow: pip install pillow") from error
    opened = _opened(image)
    _check_size(*opened.size)
    if opened.mode not in _MODES:
        raise RequestError(
            f"the image is of mode {opened.mode}; convert it to RGB, for instance with "
            "image.convert('RGB')"
        )
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # it is decoded here
        raise _unreadable(error) from error


def _opened(image: Any) -> Image:
    """Its kind and size are known, its pixels perhaps not yet."""
    from PIL import Image as images

    if isinstance(image, images.Image):
        return image
    if not isinstance(image, (bytes, bytearray, memoryview)):
        return images.fromarray(_checked_array(image))
    try:
        return images.open(io.BytesIO(image), formats=_FORMATS)
    except Exception as error:  # each image format's decoder has its own
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> RequestError:
    return RequestError(f"the image cannot be decoded ({describe(error)}); {_EXPECTED}")


def _check_size(width: int, height: int) -> None:
    if not 1 <= width * height <= MOST_PIXELS or max(width, height) > MOST_SIDE:
        raise RequestError(
            f"the image has {width} x {height} pixels; from 1 to {MOST_PIXELS} can be read, "
            f"{MOST_SIDE} of a side: give a smaller one"
        )


def _checked_array(image: Any) -> Any:
    """A numpy array or a torch tensor as an array that Pillow takes."""
    if not is_array(image):
        raise RequestError(f"the image is {shown(image)}; {_EXPECTED}")
    try:
        dtype, shape = str(image.dtype).removeprefix("torch."), tuple(image.shape)
    except RuntimeError as error:  # of a nested tensor
        raise _unreadable(error) from error
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise RequestError(f"the image is an array of {dtype} of shape {shape}; {_EXPECTED}")
    _check_size(shape[1], shape[0])  # before it is copied
    try:
        return image.cpu().numpy() if isinstance(image, torch.Tensor) else image
    except (RuntimeError, TypeError) as error:  # without memory, or of a layout that is no array
        raise _unreadable(error) from error


def cut_image(image: Image, config: VisionConfig) -> Crops:
    """Scales an RGB image so that whole tiles cover it, and cuts it up. Neighbouring tiles overlap:
    each sees `config.margin` patches of those around it.
    """
    size, margin = config.crop_size, config.margin * config.patch
    step = size - 2 * margin
    width, height = image.size
    rows, columns = choose_tiling(height - 2 * margin, width - 2 * margin, step, config.most_tiles)
    scaled = _pixels(image, columns * step + 2 * margin, rows * step + 2 * margin)
    crops = [_pixels(image, size, size)]
    for row in range(rows):
        for column in range(columns):
            top, left = row * step, column * step
            crops.append(scaled[:, top : top + size, left : left + size])
    return Crops(torch.stack(crops), rows, columns)


def _pixels(image: Image, width: int, height: int) -> torch.Tensor:
    """Scaled: float32 [3, height, width] from -1 to 1."""
    from PIL.Image import Resampling

    scaled = image.resize((width, height), Resampling.LANCZOS)
    values = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1).float() / 127.5 - 1


def choose_tiling(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles for an image of this size: of its shape, and as many as there
    may be, but one for an image that is no higher, or no wider, than a tile.
    """
    if height <= tile or width <= tile:
        return 1, 1
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    if rows * columns > most:
        ratio = math.sqrt(most / (rows * columns))
        rows, columns = max(1, int(rows * ratio)), max(1, int(columns * ratio))
    else:
        rows = max(rows, int(math.sqrt(most * height / width)))
        columns = max(columns, int(math.sqrt(most * width / height)))
    if rows * columns > most:
        rows, columns = (rows, most // rows) if columns > rows else (most // columns, columns)
    return max(1, rows), max(1, columns)
