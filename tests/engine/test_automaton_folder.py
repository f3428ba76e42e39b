"""Automata in a folder: what was compiled once is read, and nothing else is taken for it."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import llguidance  # noqa: F401  without it these tests are left out
import numpy as np
import pytest

from photon_ext.engine import automaton_folder, compiled_grammar
from photon_ext.engine.automaton_folder import AutomatonFolder, made_folder
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.errors import ConfigError
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.automaton_file import automaton_bytes, read_automaton
from photon_ext.sampling.byte_automaton import AutomatonLimits
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.pattern import NotRegular
from photon_ext.sampling.token_automaton import TokenAutomaton
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer

EOS = 0
WORDS = 2**18
FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-c]{2,9}é?"},
    "choice": {"choice": ["yes", "no"]},
    "schema": {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
}


def grammar(name: str) -> Grammar:
    found = SamplingParams(**FORMS[name]).answer_grammar
    assert found is not None
    return found


def compiled(folder: Path, name: str = "regex", vocab: int = VOCAB) -> TokenAutomaton:
    """By an engine's compiler that has compiled nothing yet."""
    made = GrammarCompiler(byte_tokenizer(), vocab, [EOS], WORDS, automata_dir=folder)
    return made.automaton(grammar(name))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each automaton that is made anew."""
    made: list[object] = []
    make = compiled_grammar.byte_automaton

    def noted(*args: Any) -> Any:
        made.append(args[0])
        return make(*args)

    monkeypatch.setattr(compiled_grammar, "byte_automaton", noted)
    return made


@pytest.mark.parametrize("name", FORMS)
def test_what_one_engine_compiled_another_reads(
    name: str, tmp_path: Path, compilations: list[object]
) -> None:
    first = compiled(tmp_path, name)
    again = compiled(tmp_path, name)
    assert len(compilations) == 1
    assert again.tables.equal(first.tables)
    assert (again.masks == first.masks).all()
    assert (again.mask_of == first.mask_of).all()
    assert [again.accepts(i) for i in range(len(again.complete))] == [
        first.accepts(i) for i in range(len(first.complete))
    ]


def test_another_vocabulary_form_or_library_finds_nothing(
    tmp_path: Path, compilations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    compiled(tmp_path, "choice")
    compiled(tmp_path, vocab=VOCAB + 32)
    monkeypatch.setattr(automaton_folder.metadata, "version", lambda name: "another")
    compiled(tmp_path)
    monkeypatch.setattr(automaton_folder, "FORMAT", -1)
    compiled(tmp_path)
    assert len(compilations) == len(list(tmp_path.iterdir())) == 5


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:40], flipped, lambda data: bytes(100)],
    ids=["empty", "cut", "flipped", "zeros"],
)
def test_a_damaged_file_is_told_ignored_and_written_anew(
    damage: Any, tmp_path: Path, compilations: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    first = compiled(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING, "photon_ext"):
        assert compiled(tmp_path).tables.equal(first.tables)
    assert "is not used, and will be written anew" in caplog.text
    assert len(compilations) == 2
    compiled(tmp_path)
    assert len(compilations) == 2


def test_a_file_under_another_name_is_not_taken(tmp_path: Path, compilations: list[object]) -> None:
    compiled(tmp_path)
    (file,) = tmp_path.iterdir()
    compiled(tmp_path, "choice")
    (other,) = set(tmp_path.iterdir()) - {file}
    os.replace(other, file)
    assert compiled(tmp_path).tables.equal(compiled(tmp_path / "no folder").tables)
    assert len(compilations) == 4, "where it cannot be written, it is made each time"


def test_bytes_are_read_for_their_key_and_within_limits(tmp_path: Path) -> None:
    automaton = compiled(tmp_path)
    data, limits = automaton_bytes(automaton, b"key"), AutomatonLimits()
    assert read_automaton(data, b"key", automaton.vocabulary, limits).tables.equal(automaton.tables)
    with pytest.raises(NotRegular, match="tables take more than"):
        read_automaton(data, b"key", automaton.vocabulary, limits._replace(size=8))
    for wrong in (data[1:], b"", hashlib.sha256(b"keyno arrays").digest() + b"no arrays"):
        with pytest.raises(ValueError, match=r"digest|pickled"):
            read_automaton(wrong, b"key", automaton.vocabulary, limits)
    with pytest.raises(ValueError, match="digest"):
        read_automaton(data, b"another", automaton.vocabulary, limits)


def test_what_is_no_file_or_too_large_is_not_read(
    tmp_path: Path, compilations: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    compiled(tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)  # whoever opens it waits for a writer
    compiled(tmp_path)
    with file.open("wb") as large:
        large.truncate(2**40)
    compiled(tmp_path)
    assert len(compilations) == 3
    assert caplog.text.count("it is no regular file of up to") == 2


@pytest.mark.parametrize("field", ["classes", "transitions", "mask_of", "accepting"])
def test_numbers_that_point_nowhere_are_no_automaton(field: str, tmp_path: Path) -> None:
    automaton = compiled(tmp_path)
    named: dict[str, Any] = automaton.by_bytes._asdict()
    named |= {"masks": automaton.masks, "mask_of": automaton.mask_of}
    named[field] = named[field][:0] if field == "accepting" else named[field] + 100
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **named)
    forged = hashlib.sha256(b"key" + buffer.getvalue()).digest() + buffer.getvalue()
    with pytest.raises(ValueError, match="its numbers do not fit together"):
        read_automaton(forged, b"key", automaton.vocabulary, AutomatonLimits())


def test_a_file_that_cannot_be_marked_as_used_is_used_all_the_same(
    tmp_path: Path, compilations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)

    def refused(file: Path) -> None:
        raise PermissionError(file)

    monkeypatch.setattr(os, "utime", refused)
    compiled(tmp_path)
    assert len(compilations) == 1
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644


def test_the_least_recently_used_go_first_and_what_a_death_left_behind(tmp_path: Path) -> None:
    automaton = compiled(tmp_path / "other")
    size = len(automaton_bytes(automaton, b""))
    stuck = tmp_path / ("0" * 64 + ".automaton")  # cannot be removed, and keeps nothing else there
    stuck.mkdir()
    room = stuck.stat().st_size + 2 * size + size // 2
    folder = AutomatonFolder(tmp_path, "a tokenizer", room)
    left = tmp_path / "photon-left.unfinished"
    left.write_bytes(bytes(size))
    for mine in ("mine.txt", "mine.automaton"):
        (tmp_path / mine).write_bytes(bytes(10 * size))
        os.utime(tmp_path / mine, (1, 1))
    loop = tmp_path / ("1" * 64 + ".automaton")
    loop.symlink_to(loop)
    for old in (left, stuck):
        os.utime(old, (1, 1))
    forms = [grammar("regex")._replace(text=text) for text in "abc"]
    vocabulary, limits = automaton.vocabulary, AutomatonLimits()

    def used(form: Grammar, at: int) -> None:
        os.utime(folder._file(folder._key(form)), (at, at))

    for at, form in enumerate(forms[:2], 2):
        folder.save(form, automaton)
        used(form, at)
    assert folder.load(forms[0], vocabulary, limits) is not None  # now the last one used
    folder.save(forms[2], automaton)
    assert not left.exists()
    assert folder.load(forms[1], vocabulary, limits) is None
    assert folder.load(forms[0], vocabulary, limits) is not None
    assert folder.load(forms[2], vocabulary, limits) is not None
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "mine.automaton").exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", 3, "a\0b", np.array([1, 2])):
        with pytest.raises(ConfigError, match=r"^automata_dir is .* which is no folder"):
            made_folder(path)
    assert made_folder(str(tmp_path / "new" / "one")).is_dir()
