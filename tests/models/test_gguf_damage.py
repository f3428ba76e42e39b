"""GGUF files whose counts, lengths, offsets and types lie.

Each is refused by name, before it is believed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from photon_ext.errors import ModelError
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.loader import load_model
from tests.forked import run_script
from tests.models.tiny import tiny_model
from tests.models.tiny_gguf import TOKENS, write_tiny_gguf

# Parts of the fields that the package's reader makes.
ARRAY_COUNT, VALUE = 4, 3
NAME_LENGTH, DIMS, SIZES, TYPE, OFFSET = 0, 2, 3, 4, 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tiny_gguf(tiny_model("llama-plain"), tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def lie(path: Path, field: Any, part: int, value: int) -> None:
    """Overwrites a number of the file: of a part of a field, as the package's reader finds it."""
    start = field.offset + sum(each.nbytes for each in field.parts[:part])
    content = bytearray(path.read_bytes())
    content[start : start + field.parts[part].itemsize] = value.to_bytes(
        field.parts[part].itemsize, "little"
    )
    path.write_bytes(content)


def metadata(path: Path, key: str) -> Any:
    return gguf.GGUFReader(path).fields[key]


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def in_order(path: Path) -> list[str]:
    return list(tensors(path))


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as raised:
        load_model(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: damaged or cut short at {path.stat().st_size} bytes (")
    assert len(message) < 600 + len(str(path))
    return message


@pytest.mark.parametrize(
    "key", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens"], ids=["numbers", "strings"]
)
@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
def test_a_lying_count_of_an_array(key: str, count: int, path: Path) -> None:
    lie(path, metadata(path, key), ARRAY_COUNT, count)
    assert f"({count} elements (" in refused(path)


def test_a_lying_count_does_not_take_time_or_memory(path: Path) -> None:
    """Gigabytes behind it make the count possible, but no model has so many elements."""
    lie(path, metadata(path, "tokenizer.ggml.token_type"), ARRAY_COUNT, 2**29)
    with path.open("r+b") as file:
        file.truncate(2**32)  # sparse
    code = f"""
import resource
from pathlib import Path
from photon_ext.models.loading.gguf_file import GgufFile
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
try:
    GgufFile(Path({str(path)!r}))
except ValueError as error:
    print(error)
"""
    result = run_script(code)
    assert "536870912 elements of an array" in result.stdout, result.stderr
    assert "expected up to 16777216" in result.stdout


@pytest.mark.parametrize(
    ("key", "part", "what"),
    [
        ("GGUF.tensor_count", 0, "tensors"),
        ("GGUF.kv_count", 0, "metadata keys"),
        ("general.architecture", VALUE, "elements"),
    ],
)
@pytest.mark.parametrize("value", [2**32, 2**62, 2**64 - 1])
def test_a_lying_count_of_tensors_keys_or_characters(
    key: str, part: int, what: str, value: int, path: Path
) -> None:
    lie(path, metadata(path, key), part, value)
    message = refused(path)
    assert f"({value} {what} at byte " in message
    assert "where the file has room for " in message


def text_place(path: Path, token: int) -> int:
    """Where the length of a token's text stands in the file."""
    field = metadata(path, "tokenizer.ggml.tokens")
    return int(field.offset + sum(each.nbytes for each in field.parts[: field.data[token] - 1]))


def overwrite(path: Path, place: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(new)] = new
    path.write_bytes(content)


@pytest.mark.parametrize("token", [0, len(TOKENS) - 1], ids=["first", "last"])
@pytest.mark.parametrize("length", [2**32, 2**63, 2**64 - 1])
def test_a_lying_length_of_a_text(length: int, token: int, path: Path) -> None:
    place = text_place(path, token)
    overwrite(path, place, length.to_bytes(8, "little"))
    assert (
        f"({length} bytes of a text at byte {place + 8}, where the file has room for "
        in refused(path)
    )


def test_a_text_that_is_not_utf_8(path: Path) -> None:
    place = text_place(path, 4) + 8
    overwrite(path, place, b"\xff")
    message = refused(path)
    assert f"(text 4 of an array, at byte {place}: 'utf-8' codec can't decode byte 0xff" in message


@pytest.mark.parametrize("merge", [b"a q", b"aqb"], ids=["unknown", "no pair"])
def test_a_merge_that_does_not_fit_the_vocabulary(merge: bytes, path: Path) -> None:
    place = path.read_bytes().index((3).to_bytes(8, "little") + b"a b") + 8
    overwrite(path, place, merge)
    with pytest.raises(ModelError, match="vocabulary and merges do not fit together"):
        load_model(path)


@pytest.mark.parametrize("shift", [-32, 1, 4, 32, 2**64 - 32], ids=str)
def test_tensors_lie_one_behind_the_other(shift: int, path: Path) -> None:
    name = in_order(path)[1]
    tensor = tensors(path)[name]
    offset = int(tensor.field.parts[OFFSET][0])
    wrong = (offset + shift) % 2**64
    lie(path, tensor.field, OFFSET, wrong)
    assert (
        f"tensor '{name}': offset is {wrong}, expected {offset}, the padded end of the tensor "
        "before" in refused(path)
    )


def test_two_tensors_that_change_places_are_refused(path: Path) -> None:
    a, b = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    before = tensors(path)
    for one, other in ((a, b), (b, a)):
        lie(path, before[one].field, OFFSET, int(before[other].field.parts[OFFSET][0]))
    assert ": offset is " in refused(path)


def test_the_last_tensor_ends_inside_the_file(path: Path) -> None:
    content = path.read_bytes()
    last = in_order(path)[-1]
    path.write_bytes(content[:-32])
    assert (
        f"tensor '{last}': ends at byte {len(content)}, the file at {len(content) - 32}"
        in refused(path)
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (gguf.GGMLQuantizationType.F16, ": offset is "),
        (gguf.GGMLQuantizationType.Q8_0, ": offset is "),
        (
            gguf.GGMLQuantizationType.Q4_K,
            ": rows of 64 elements, expected a multiple of 256, the block of Q4_K",
        ),
        (4, ": type is 4, which the gguf package does not know"),
        (2**31, ": type is 2147483648, which the gguf package does not know"),
    ],
    ids=str,
)
def test_a_type_that_does_not_fit_is_refused(kind: int, message: str, path: Path) -> None:
    lie(path, tensors(path)[in_order(path)[0]].field, TYPE, int(kind))
    assert message in refused(path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (NAME_LENGTH, 2**50, "1125899906842624 elements at byte "),
        (DIMS, 2**31, "2147483648 elements at byte "),
        (SIZES, 0, ": sizes are [0, "),
        (SIZES, 2**62, ": ends at byte "),
    ],
)
def test_names_and_sizes_of_tensors_that_lie(
    part: int, value: int, message: str, path: Path
) -> None:
    lie(path, tensors(path)[in_order(path)[0]].field, part, value)
    assert message in refused(path)


def test_alignment_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny_model("llama-plain"), path)
    plain = load_model(path)
    write_tiny_gguf(tiny_model("llama-plain"), path, alignment=256)
    wide = load_model(path)
    for one, other in zip(plain.weights.tensors(), wide.weights.tensors(), strict=True):
        assert bool((one == other).all())
    field = metadata(path, "general.alignment")
    for value, message in [
        (0, "Invalid alignment"),
        (48, "Invalid alignment"),
        (2**30, "general.alignment is 1073741824, expected up to 65536"),
        (512, ": offset is "),
        (32, " bytes follow the last tensor, expected less than 32, the alignment"),
    ]:
        lie(path, field, VALUE, value)
        assert message in refused(path), value


def test_a_smaller_type_of_the_last_tensor_leaves_a_rest(path: Path) -> None:
    *_, last = tensors(path).values()
    lie(path, last.field, TYPE, int(gguf.GGMLQuantizationType.F16))
    assert f"{last.n_bytes // 2} bytes follow the last tensor" in refused(path)


def test_arrays_of_numbers_and_strings_are_read_whole(path: Path) -> None:
    ours, theirs = GgufFile(path).fields, gguf.GGUFReader(path).fields
    assert ours == {key: field.contents() for key, field in theirs.items()}
    assert isinstance(ours["tokenizer.ggml.token_type"][0], int)
    assert not isinstance(ours["tokenizer.ggml.token_type"], np.ndarray)


@pytest.mark.parametrize("order", list(gguf.GGUFEndian))
def test_texts_of_either_order_of_bytes_empty_and_in_arrays_of_arrays(
    order: gguf.GGUFEndian, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=order)
    writer.add_array("some.texts", ["", "é", "a" * 300])
    writer.add_array("some.lists", [["a", "b"], ["", "c"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = GgufFile(tmp_path / "m.gguf").fields
    assert fields["some.texts"] == ["", "é", "a" * 300]
    assert fields["some.lists"] == ["a", "b", "", "c"]
