"""Images: every form that is taken, every one that is refused, and how they are cut up."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from photon_ext.errors import RequestError
from photon_ext.models import images
from photon_ext.models.images import choose_tiling, cut_image, read_image
from photon_ext.models.vision import VisionConfig

CONFIG = VisionConfig(crop_size=24, patch=4, margin=1, most_tiles=6)  # a tile is 16 pixels wide


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def test_every_form_of_an_image_is_the_same_image() -> None:
    array = picture(5, 7)
    image = Image.fromarray(array)
    data = file_of(image, "PNG")
    forms = (array, torch.from_numpy(array), image, data, bytearray(data), memoryview(data))
    for form in forms:
        read = read_image(form)
        assert read.mode == "RGB"
        assert np.array_equal(np.asarray(read), array)


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr"])
def test_images_of_other_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(picture(5, 7)).convert(mode)
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(image.convert("RGB")))


def test_an_image_is_turned_as_its_camera_says() -> None:
    image = Image.fromarray(picture(5, 7))
    turned = Image.Exif()
    turned[0x0112] = 6  # Orientation: turn it by 90 degrees
    read = read_image(file_of(image, "PNG", exif=turned))
    assert read.size == (5, 7)
    assert np.array_equal(np.asarray(read), np.rot90(picture(5, 7), -1))


PNG = file_of(Image.fromarray(picture(50, 70)), "PNG")


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (b"", "the image cannot be decoded (UnidentifiedImageError"),
        (b"no image", "the image cannot be decoded (UnidentifiedImageError"),
        (PNG[: len(PNG) // 2], "the image cannot be decoded (OSError"),
        (Image.new("RGB", (0, 5)), "the image has 0 x 5 pixels; from 1 to"),
        (Image.new("F", (3, 5)), "the image is of mode F; convert it to RGB"),
        (Image.new("I", (3, 5)), "the image is of mode I; convert it to RGB"),
        (np.zeros((0, 5, 3), np.uint8), "an array of uint8 of shape (0, 5, 3); give a PIL image"),
        (np.zeros((4, 5), np.uint8), "an array of uint8 of shape (4, 5); give a PIL image"),
        (np.zeros((4, 5, 3)), "an array of float64 of shape (4, 5, 3); give a PIL image"),
        (torch.zeros(3, 4, 5), "an array of float32 of shape (3, 4, 5); give a PIL image"),
        (torch.zeros(4, 5, 3, dtype=torch.bfloat16), "an array of bfloat16 of shape (4, 5, 3)"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8, device="meta"), "cannot be decoded (NotImpl"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8).to_sparse(), "cannot be decoded (TypeError"),
        ("cat.png", "the image is 'cat.png'; give a PIL image"),
        (None, "the image is None; give a PIL image"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        read_image(image)


def test_too_many_pixels_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 50 * 70 - 1)
    with pytest.raises(RequestError, match="the image has 70 x 50 pixels; from 1 to 3499"):
        read_image(PNG[:200])  # its header alone


def test_what_takes_too_much_memory_to_scale_or_to_copy_is_refused() -> None:
    for size in ((2**16 + 1, 1), (1, 2**16 + 1)):
        with pytest.raises(RequestError, match=f"{size[0]} x {size[1]} pixels; .* 65536 of a side"):
            read_image(Image.new("L", size))
    assert cut_image(read_image(Image.new("L", (2**16, 1))), CONFIG).rows == 1
    pixel = np.zeros((1, 1, 3), np.uint8)
    with pytest.raises(RequestError, match="the image has 60000 x 60000 pixels"):
        read_image(np.broadcast_to(pixel, (60000, 60000, 3)))  # 10 GB as an array of its own


def test_files_that_other_programs_would_decode_are_refused() -> None:
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"
    with pytest.raises(RequestError, match=r"cannot identify image file .* a file \(JPEG, PNG"):
        read_image(program)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000"])
def test_files_of_common_kinds_are_read(kind: str) -> None:
    assert read_image(file_of(Image.fromarray(picture(5, 7)), kind)).size == (7, 5)


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match="need the Python package Pillow: pip install pillow"):
        read_image(PNG)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 12))
def test_tiles_are_within_bounds(height: int, width: int, most: int) -> None:
    rows, columns = choose_tiling(height, width, 16, most)
    assert rows >= 1 <= columns
    assert rows * columns <= most


@pytest.mark.parametrize(
    ("height", "width", "tiling"),
    [
        (10, 500, (1, 1)),
        (17, 17, (3, 3)),
        (100, 100, (3, 3)),
        (50, 200, (1, 6)),
        (20, 60, (2, 6)),
        (60, 20, (6, 2)),
    ],
)
def test_tiles_have_the_shape_of_the_image(
    height: int, width: int, tiling: tuple[int, int]
) -> None:
    assert choose_tiling(height, width, 16, 12) == tiling


def test_crops_are_the_whole_and_overlapping_tiles() -> None:
    image = Image.fromarray(picture(40, 56))  # 2 x 3 tiles of 16 pixels and the outer margins
    crops = cut_image(image, CONFIG)
    assert (crops.rows, crops.columns) == (2, 3)
    exact = torch.from_numpy(picture(40, 56)).permute(2, 0, 1).float() / 127.5 - 1
    whole = np.array(image.resize((24, 24), Image.Resampling.LANCZOS))
    torch.testing.assert_close(
        crops.pixels[0], torch.from_numpy(whole).permute(2, 0, 1) / 127.5 - 1
    )
    for number, (top, left) in enumerate([(0, 0), (0, 16), (0, 32), (16, 0), (16, 16), (16, 32)]):
        expected = exact[:, top : top + 24, left : left + 24]
        torch.testing.assert_close(crops.pixels[1 + number], expected)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3000), (3000, 1), (24, 24)])
def test_images_of_any_shape_are_cut(height: int, width: int) -> None:
    crops = cut_image(Image.fromarray(picture(height, width)), CONFIG)
    assert crops.pixels.shape == (1 + crops.rows * crops.columns, 3, 24, 24)
    assert crops.pixels.abs().max() <= 1
