"""Checkpoints with weights of four bits: each layout against plain Python, and clear errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from photon_ext.errors import ModelError
from photon_ext.models.loading.int4_config import Int4Scheme, Layout
from photon_ext.models.loading.int4_tensors import Int4Tensors, expected, unpacked
from tests.models.stored_int4 import Codes, random_codes, stored, turned, word, words

FILE = Path("a/model.safetensors")
MODULE = "model.layers.1.mlp.down_proj"
N, K = 24, 128
LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def unpack(scheme: Int4Scheme, tensors: dict[str, torch.Tensor]) -> Int4Tensors:
    return unpacked(scheme, tensors, FILE, MODULE)


def codes_of(data: torch.Tensor) -> list[list[int]]:
    """An even column is in the low four bits of a byte, the next in the high ones."""
    assert data.dtype is torch.uint8
    return [[code for byte in row for code in (byte % 16, byte // 16)] for row in data.tolist()]


def assert_is(found: Int4Tensors, weight: Codes, zeros: bool) -> None:
    assert codes_of(found.data) == weight.codes
    assert torch.equal(found.scale, weight.scale)
    assert found.scale.dtype is weight.scale.dtype
    if zeros:
        assert found.zero is not None
        assert (found.zero.dtype, found.zero.tolist()) == (torch.uint8, weight.zeros)
    else:
        assert found.zero is None
    assert all(one.is_contiguous() for one in found if one is not None)


# --- the layouts ----------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("zeros", [True, False])
def test_codes_scales_and_zero_points_are_those_that_were_stored(
    layout: Layout, group: int | None, zeros: bool
) -> None:
    weight = random_codes(N, K, K // (group or K), zeros, torch.float16)
    found = unpack(Int4Scheme(layout, group, zeros), stored(layout, weight))
    assert_is(found, weight, zeros)


@LAYOUTS
def test_a_module_passes_through_a_file_as_expected_describes_it(
    layout: Layout, tmp_path: Path
) -> None:
    scheme = Int4Scheme(layout, 32, True)
    weight = random_codes(N, K, K // 32, True, torch.bfloat16)
    tensors = stored(layout, weight)
    path = tmp_path / "model.safetensors"
    save_file({f"{MODULE}.{name}": one for name, one in tensors.items()}, path)
    wanted = expected(scheme, MODULE, N, K)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(wanted)
        for name, one in wanted.items():
            part = file.get_slice(name)
            assert one.has(part.get_shape()), name
            assert part.get_dtype() in one.dtypes, name
        read = {name.rpartition(".")[2]: file.get_tensor(name) for name in wanted}
    assert_is(unpack(scheme, read), weight, True)


def test_gptq_words_by_hand() -> None:
    """Word r of column c of qweight has the columns 8 r to 8 r + 7 of output c."""
    tensors = stored(Layout.GPTQ_V2, random_codes(8, 32, 1, False, torch.float32))
    tensors["qweight"] = words([[0x76543210] * 8, [0xFEDCBA98] * 8, [0] * 8, [0xFFFFFFFF] * 8])
    row = [*range(16), *[0] * 8, *[15] * 8]
    assert codes_of(unpack(Int4Scheme(Layout.GPTQ_V2, 32, True), tensors).data) == [row] * 8


def test_awq_words_by_hand() -> None:
    tensors = stored(Layout.AWQ, random_codes(8, 32, 1, False, torch.float32))
    tensors["qweight"] = words([[0x76543210]] * 31 + [[0xFEDCBA98]])
    tensors["qzeros"] = words([[0x76543210]])
    found = unpack(Int4Scheme(Layout.AWQ, 32, True), tensors)
    outputs = [0, 4, 1, 5, 2, 6, 3, 7]  # where output 0, 1, 2... stands
    assert codes_of(found.data) == [[one] * 31 + [one + 8] for one in outputs]
    assert found.zero is not None
    assert found.zero.tolist() == [[one] for one in outputs]


@pytest.mark.parametrize(
    ("layout", "zeros"),
    [
        (Layout.GPTQ_V2, 0x76543210),
        (Layout.GPTQ, 0x654320FF),  # less 1 each: that of output 0 borrows from output 1
    ],
)
def test_zero_points_of_each_version_of_gptq(layout: Layout, zeros: int) -> None:
    tensors = stored(layout, random_codes(8, 32, 1, True, torch.float32))
    tensors["qzeros"] = words([[zeros]])
    found = unpack(Int4Scheme(layout, 32, True), tensors).zero
    assert found is not None
    assert found.flatten().tolist() == list(range(8))


@pytest.mark.parametrize("n", [20, 21, 24])
def test_compressed_zero_points_fill_up_their_last_words(n: int) -> None:
    weight = random_codes(n, 64, 2, True, torch.float16)
    tensors = stored(Layout.COMPRESSED, weight)
    assert tensors["weight_zero_point"].shape == (3, 2)
    assert_is(unpack(Int4Scheme(Layout.COMPRESSED, 32, True), tensors), weight, True)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scales_keep_sixteen_bits_and_else_have_thirty_two(
    layout: Layout, dtype: torch.dtype
) -> None:
    weight = random_codes(N, K, 4, False, dtype)
    scale = unpack(Int4Scheme(layout, 32, False), stored(layout, weight)).scale
    assert scale.dtype is (dtype if dtype.itemsize == 2 else torch.float32)
    assert torch.equal(scale, weight.scale.to(scale.dtype))


@LAYOUTS
def test_tensors_that_are_views_are_read_as_they_are_seen(layout: Layout) -> None:
    weight = random_codes(N, K, 4, True, torch.float16)
    views = {
        name: one.t().contiguous().t() if one.dim() == 2 else one
        for name, one in stored(layout, weight).items()
    }
    assert_is(unpack(Int4Scheme(layout, 32, True), views), weight, True)


def test_what_lies_right_already_is_not_copied() -> None:
    tensors = stored(Layout.COMPRESSED, random_codes(N, K, 4, False, torch.float16))
    found = unpack(Int4Scheme(Layout.COMPRESSED, 32, False), tensors)
    assert found.data.data_ptr() == tensors["weight_packed"].data_ptr()
    assert found.scale.data_ptr() == tensors["weight_scale"].data_ptr()


# --- what files must have -------------------------------------------------------------------------


def shapes(scheme: Int4Scheme, n: int = 4096, k: int = 14336) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in expected(scheme, "a.b", n, k).items()}


def test_expected_names_and_shapes() -> None:
    assert shapes(Int4Scheme(Layout.GPTQ, 128, False)) == {
        "a.b.qweight": (1792, 4096),
        "a.b.qzeros": (112, 512),
        "a.b.scales": (112, 4096),
        "a.b.g_idx": (14336,),
    }
    assert shapes(Int4Scheme(Layout.AWQ, None, True)) == {
        "a.b.qweight": (14336, 512),
        "a.b.qzeros": (1, 512),
        "a.b.scales": (1, 4096),
    }
    assert shapes(Int4Scheme(Layout.COMPRESSED, 32, False), n=4001) == {
        "a.b.weight_packed": (4001, 1792),
        "a.b.weight_scale": (4001, 448),
        "a.b.weight_shape": (2,),
    }
    zeros = shapes(Int4Scheme(Layout.COMPRESSED, None, True), n=4001)
    assert zeros["a.b.weight_zero_point"] == (501, 1)


@pytest.mark.parametrize(
    ("scheme", "n", "k", "message"),
    [
        (Int4Scheme(Layout.GPTQ, 128, False), 64, 192, "has 192 columns.*whole groups of 128"),
        (Int4Scheme(Layout.COMPRESSED, 64, False), 64, 32, "has 32 columns.*whole groups of 64"),
        (Int4Scheme(Layout.AWQ, None, True), 64, 48, "has 48 columns.*asks for multiples of 32"),
        (Int4Scheme(Layout.AWQ, None, True), 64, 0, "has 0 columns.*asks for multiples of 32"),
        (Int4Scheme(Layout.GPTQ, 32, True), 63, 64, "has 63 outputs.*gptq stores multiples of 8"),
        (Int4Scheme(Layout.AWQ, 32, True), 4, 64, "has 4 outputs.*awq stores multiples of 8"),
    ],
)
def test_modules_that_no_file_can_store_so_are_refused(
    scheme: Int4Scheme, n: int, k: int, message: str
) -> None:
    with pytest.raises(ModelError, match=rf"^{re.escape(MODULE)} {message}.*; use a checkpoint"):
        expected(scheme, MODULE, n, k)


NAN, INF = float("nan"), float("inf")
ORDER = torch.arange(K) // 32


def with_value(tensor: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("layout", "name", "change", "message"),
    [
        (Layout.GPTQ, "scales", lambda one: with_value(one, (2, 3), NAN), r"is nan at \[2, 3\]"),
        (Layout.AWQ, "scales", lambda one: with_value(one, (0, 1), -INF), r"is -inf at \[0, 1\]"),
        (
            Layout.COMPRESSED,
            "weight_scale",
            lambda one: with_value(one.float(), (5, 1), 3e38),
            r"is 3e\+38 at \[5, 1\], and numbers of a weight are finite in float32",
        ),
        (
            Layout.COMPRESSED,
            "weight_scale",
            lambda one: with_value(one.double(), (5, 1), 1e300),
            r"is 1e\+300 at \[5, 1\]",
        ),
        (Layout.GPTQ, "scales", lambda one: one[:2], r"has shape \[2, 24\].* is \[4, 24\]"),
        (Layout.GPTQ, "scales", lambda one: one.t(), r"has shape \[24, 4\].* is \[4, 24\]"),
        (Layout.AWQ, "scales", lambda one: one[:1], r"a weight \[24, 128\] in groups of 32"),
        (Layout.AWQ, "qzeros", lambda one: one[:, :1], r"has shape \[4, 1\].* is \[4, 3\]"),
        (Layout.GPTQ, "qweight", lambda one: one.flatten(), "shape .*expected two dimensions"),
        (Layout.GPTQ, "g_idx", lambda one: one[:64], r"has shape \[64\].* is \[128\]"),
        (
            Layout.GPTQ,
            "g_idx",
            lambda one: one.flip(0),
            r"column 0 is in group 3 and not in 0: .*\(desc_act\); use .* desc_act false",
        ),
        (Layout.GPTQ, "g_idx", lambda one: with_value(one, (70,), 3), "column 70 is in group 3"),
        (Layout.GPTQ, "qweight", lambda one: one.float(), "is stored as F32, expected I32"),
        (Layout.AWQ, "qzeros", lambda one: one.to(torch.int8), "stored as torch.int8, expected"),
        (Layout.AWQ, "scales", lambda one: one.int(), "is stored as I32, expected F64 or F32"),
        (Layout.COMPRESSED, "weight_shape", lambda one: one.flip(0), r"is \[128, 24\].* \[24, 128"),
        (Layout.COMPRESSED, "weight_shape", lambda one: one[:1], r"has shape \[1\].* is \[2\]"),
        (
            Layout.COMPRESSED,
            "weight_zero_point",
            lambda one: one[:2],
            r"has shape \[2, 4\].* is \[3, 4\]",
        ),
        (Layout.COMPRESSED, "weight_packed", lambda one: one.short(), "is stored as torch.int16"),
        (Layout.GPTQ, "qzeros", lambda one: None, "is missing; .*download both again"),
        (Layout.AWQ, "qweight", lambda one: None, "is missing"),
        (Layout.COMPRESSED, "weight_zero_point", lambda one: None, "is missing"),
        (Layout.AWQ, "g_idx", lambda one: ORDER, "is not part of .* would be ignored"),
    ],
)
def test_hazard_c6_tensors_that_do_not_belong_together_are_refused(
    layout: Layout, name: str, change: Any, message: str
) -> None:
    tensors = stored(layout, random_codes(N, K, 4, True, torch.float16))
    scheme = Int4Scheme(layout, 32, True)
    unpack(scheme, tensors)
    changed: dict[str, torch.Tensor] = {**tensors, name: change(tensors.get(name))}
    told = {key: one for key, one in changed.items() if one is not None}
    with pytest.raises(ModelError, match=f"^{re.escape(f'{FILE}: {MODULE}.{name}')} .*{message}"):
        unpack(scheme, told)


def test_codes_of_another_size_than_all_else_are_refused() -> None:
    tensors = stored(Layout.AWQ, random_codes(N, K, 4, True, torch.float16))
    tensors["qweight"] = tensors["qweight"][:64]
    with pytest.raises(ModelError, match=r"qzeros has shape \[4, 3\].*\[24, 64\] .* is \[2, 3\]"):
        unpack(Int4Scheme(Layout.AWQ, 32, True), tensors)


@pytest.mark.parametrize("group", [64, 128, None])
@LAYOUTS
def test_hazard_c6_groups_of_another_size_than_the_config_says_are_refused(
    layout: Layout, group: int | None
) -> None:
    tensors = stored(layout, random_codes(N, K, 4, True, torch.float16))
    with pytest.raises(ModelError, match=rf"in groups of {group or K} columns .*config\.json"):
        unpack(Int4Scheme(layout, group, True), tensors)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout.GPTQ, r"qzeros has zero points other than 8.*set sym there to false"),
        (Layout.GPTQ_V2, r'qzeros has zero points .*checkpoint_format to "gptq"'),
        (Layout.AWQ, "qzeros has zero points .*set zero_point there to true"),
        (Layout.COMPRESSED, "weight_zero_point is not part of"),
    ],
)
def test_hazard_c6_zero_points_where_there_should_be_none_are_refused(
    layout: Layout, message: str
) -> None:
    weight = random_codes(N, K, 4, False, torch.float16)
    zeros = [list(row) for row in weight.zeros]
    zeros[17][2] = 9
    with pytest.raises(ModelError, match=message):
        unpack(Int4Scheme(layout, 32, False), stored(layout, weight._replace(zeros=zeros)))


@pytest.mark.parametrize(
    ("stored_as", "read_as"), [(Layout.GPTQ, Layout.GPTQ_V2), (Layout.GPTQ_V2, Layout.GPTQ)]
)
def test_zero_points_of_the_other_version_of_gptq_are_refused(
    stored_as: Layout, read_as: Layout
) -> None:
    """Of symmetric weights; of others nothing shows it."""
    tensors = stored(stored_as, random_codes(N, K, 4, False, torch.float16))
    with pytest.raises(ModelError, match="checkpoint_format to"):
        unpack(Int4Scheme(read_as, 32, False), tensors)


def test_the_writer_is_that_of_the_layouts() -> None:
    """What the tests above stand on, once by hand."""
    assert f"{word([1, 2, 3, 4, 5, 6, 7, 8]):x}" == "87654321"
    assert turned([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]
    assert words([[2**32 - 1, 1]]).tolist() == [[-1, 1]]
