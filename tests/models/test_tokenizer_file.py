"""tokenizer.json files on which the library panics, fails or grows without bound."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from photon_ext.errors import ModelError, RequestError
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.models.text.tokenizer_file import growth
from tests.forked import run_script
from tests.models.test_tokenizer import saved_tokenizer

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "missing", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}


def written(folder: Path, **parts: Any) -> Path:
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "model": WORDS,
        "truncation": None,
        "padding": None,
    }
    whole |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps({**whole, **parts}))
    return folder


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: str) -> str:
    """A SentencePiece map with an empty search tree that holds one text."""
    return base64.b64encode(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + text.encode() + b"\0").decode()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "Cannot parse precompiled_charsmap",
        ),
        (
            {"model": {**BPE, "continuing_subword_prefix": "####"}},
            "the merge 'a b' continues no word, expected two tokens",
        ),
        ({"model": {**BPE, "dropout": 2.0}}, "Dropout should be between 0 and 1"),
        ({"model": {**BPE, "merges": ["a q"]}}, "Token `q` out of vocabulary"),
        ({"model": {**BPE, "merges": ["a " + "q" * 100_000]}}, "out of vocabulary"),
    ],
    ids=["panic", "prefix", "bare", "merge", "long"],
)
def test_what_fails_at_load_names_the_file(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as raised:
        Tokenizer.from_directory(written(tmp_path, **parts))
    assert str(raised.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 500 + len(str(tmp_path))


def test_a_prefix_that_made_the_library_end_the_process(tmp_path: Path) -> None:
    """A panic while it cleaned up behind a panic: no except clause sees that."""
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "é": 1, "aé": 2},
        "merges": ["a é"],
        "continuing_subword_prefix": "x",
    }
    code = f"""
from pathlib import Path
from photon_ext.models.text.tokenizer import Tokenizer
try:
    Tokenizer.from_directory(Path({str(written(tmp_path, model=model))!r}))
except ValueError as error:
    print(error)
"""
    result = run_script(code)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (
        "the merge 'a é' continues no word, expected two tokens, the second with the prefix 'x'"
        in result.stdout
    )


def test_merges_behind_a_prefix_are_taken(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "##b": 1, "ab": 2},
        "merges": ["a ##b"],
        "continuing_subword_prefix": "##",
    }
    assert Tokenizer.from_directory(written(tmp_path, model=model)).encode("ab") == [2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"post_processor": TEMPLATE}, "no entry found for key"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"model": {**WORDS, "unk_token": "zz"}}, "Missing [UNK] token"),
        (
            {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", -1.0]]}},
            "`unk_id` is missing",
        ),
    ],
    ids=["template", "length", "unknown", "unigram"],
)
def test_what_fails_at_encode_is_an_error_of_the_request(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_directory(written(tmp_path, **parts))
    with pytest.raises(RequestError) as raised:
        tokenizer.encode("an unknown text")
    assert "tokenizer.json: the tokenizer fails on this text; try another one (" in str(
        raised.value
    )
    assert message in str(raised.value)


@pytest.mark.parametrize("step", [{"start": 5, "stop": 5}, {"start": 1, "stop": 1}], ids=str)
def test_what_fails_at_decode_is_an_error_of_the_request(
    step: dict[str, int], tmp_path: Path
) -> None:
    decoder = {"type": "Strip", "content": "a", **step}
    tokenizer = Tokenizer.from_directory(written(tmp_path, decoder=decoder))
    ids = [0]
    with pytest.raises(
        RequestError, match=r"tokenizer\.json: the tokenizer fails on these 1 ids \("
    ):
        tokenizer.decode(ids)
    detokenizer = tokenizer.detokenizer()
    with pytest.raises(RequestError, match="the tokenizer fails on these ids"):
        detokenizer.push(0)


@pytest.mark.parametrize("where", ["normalizer", "decoder"])
@pytest.mark.parametrize("nested", [False, True])
def test_replacements_that_blow_up_are_refused(where: str, nested: bool, tmp_path: Path) -> None:
    """Forty of them make a terabyte of one letter."""
    steps: Any = [replace({"String": "a"}, "aa") for _ in range(40)]
    kind = "normalizers" if where == "normalizer" else "decoders"
    if nested:
        steps = [{"type": "Sequence", kind: steps[:20]}, {"type": "Sequence", kind: steps[20:]}]
    what = "encoding" if where == "normalizer" else "decoding"
    with pytest.raises(
        ModelError,
        match=rf"{what} may make a text 1\.1e\+12 times as long, expected up to 1024 times",
    ):
        Tokenizer.from_directory(written(tmp_path, **{where: {"type": "Sequence", kind: steps}}))


@pytest.mark.parametrize(
    "steps",
    [
        [replace({"Regex": "."}, "a" * 40), replace({"Regex": ""}, "b" * 40)],
        [replace({"String": ""}, "b" * 2000)],
        [{"type": "ByteLevel"}] * 6,
        [{"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 2000)}],
    ],
    ids=["expressions", "empty", "bytes", "map"],
)
def test_other_steps_that_grow_are_counted(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="times as long, expected up to 1024 times"):
        Tokenizer.from_directory(
            written(tmp_path, normalizer={"type": "Sequence", "normalizers": steps})
        )


def test_a_template_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    repeated = {**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000}
    with pytest.raises(ModelError, match="encoding may make a text 2e"):
        Tokenizer.from_directory(written(tmp_path, post_processor=repeated))


def test_steps_of_published_tokenizers_stay_far_below_the_bound(tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert growth(stored["pre_tokenizer"]) * growth(stored["post_processor"]) == 4.0
    llama2 = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")],
    }
    assert growth(llama2) == 1.0
    t5 = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": charsmap("صلى الله عليه وسلم")},
            replace({"Regex": " {2,}"}, "▁"),
        ],
    }
    assert growth(t5) == 36.0
