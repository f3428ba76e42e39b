"""Stop strings and incremental text: the pieces add up, and no part of a stop string is ever
shown.
"""

import codecs
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.sampling import SamplingParams
from photon_ext.sampling.answer_text import StoppedText, TextReader

LETTERS = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


class Pieces:
    """A detokenizer whose tokens are pieces of text."""

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


def stop_strings(stops: Sequence[str], include_stop: bool = False) -> StoppedText:
    automaton = SamplingParams(stop=tuple(stops)).stop_automaton
    return StoppedText(Pieces(), automaton, include_stop)


class PlainStopStrings:
    """The reference: looks at each stop string for each piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        if self.hit:
            return ""
        text = self._held + piece
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = next(
            (
                len(text) - start
                for start in range(len(text))
                if any(stop.startswith(text[start:]) for stop in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stream = stop_strings(stops)
    shown = ""
    for piece in pieces:
        shown += stream.push(piece)
        assert all(shown.find(stop) < 0 for stop in stops)
    return shown + ("" if stream.found else stream.finish()), stream.found is not None


def cut_before_first_complete_stop(text: str, stops: list[str]) -> str:
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(LETTERS, STOPS, st.data())
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = cut_before_first_complete_stop(text, stops)
    assert run(stops, pieces) == (expected, expected != text)


@given(
    st.lists(st.text(alphabet="ab😀", min_size=1, max_size=7), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab😀", max_size=6), max_size=12),
)
def test_every_piece_shows_what_looking_at_each_stop_string_would(
    stops: list[str], pieces: list[str]
) -> None:
    stream, plain = stop_strings(stops), PlainStopStrings(stops)
    for piece in pieces:
        assert (stream.push(piece), stream.found is not None) == (plain.push(piece), plain.hit)
    assert stream.finish() == plain.finish()
    for piece in pieces:  # after the end it starts over
        assert (stream.push(piece), stream.found is not None) == (plain.push(piece), plain.hit)


def calls(stream: StoppedText, text: str) -> int:
    """How many functions are called, builtins and generators included, while the stream takes
    the text.
    """
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event.endswith("call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        for character in text:
            stream.push(character)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    "stops", [[f"q{i}" for i in range(2000)], ["q" * length for length in range(101, 160)]]
)
def test_a_piece_costs_the_same_however_many_stop_strings_there_are_and_however_long(
    stops: list[str],
) -> None:
    text = "a quick sequence, " + "q" * 100
    assert calls(stop_strings(stops), text) < 1.5 * calls(stop_strings(["no", "quiet"]), text)


def test_the_automaton_is_made_once_for_all_requests_of_the_same_parameters() -> None:
    params = SamplingParams(stop=["a", "b"])
    assert params.stop_automaton is params.stop_automaton
    assert params == SamplingParams(stop=["a", "b"]), (
        "what was made of them is no part of the parameters"
    )
    assert SamplingParams().stop_automaton is None


def test_what_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    stream = stop_strings(["STOP"])
    assert [stream.push(piece) for piece in ("go S", "TO", "RE S", "T")] == [
        "go ",
        "",
        "STORE ",
        "",
    ]
    assert stream.finish() == "ST"


@given(st.lists(LETTERS, max_size=6), STOPS)
def test_a_stop_string_that_is_shown_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    without, with_stop = stop_strings(stops), stop_strings(stops, include_stop=True)
    texts = ["", ""]
    for piece in pieces:
        for i, stream in enumerate((without, with_stop)):
            texts[i] += stream.push(piece)
    assert with_stop.found == without.found
    assert texts[1] == texts[0] + (without.found or "")
    assert with_stop.finish() == without.finish()


def test_nothing_is_shown_after_a_stop() -> None:
    stream = stop_strings(["."])
    assert (stream.push("One. Two"), stream.found, stream.push(" more")) == ("One", ".", "")


class Utf8:
    """A detokenizer whose tokens are the bytes of a text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def test_a_stop_string_is_found_across_split_characters() -> None:
    text = StoppedText(Utf8(), SamplingParams(stop="é!").stop_automaton)
    shown = [text.push(byte) for byte in "café! no".encode()[:7]]
    assert "".join(shown) == "caf"
    assert text.found == "é!"
    assert text.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    text = TextReader(Utf8())
    assert "".join(text.push(byte) for byte in "né".encode()[:2]) == "n"
    assert text.finish() == "\ufffd"


def test_without_a_detokenizer_there_is_no_text() -> None:
    text = TextReader()
    assert (text.push(5), text.finish()) == ("", "")
