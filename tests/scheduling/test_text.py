"""Stop strings and incremental text: the pieces add up, and no part of a stop string is ever shown."""

from hypothesis import given
from hypothesis import strategies as st

from photon_ext.models.detokenizer import Detokenizer
from photon_ext.scheduling import StopStrings, TextStream

LETTERS = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stream = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += stream.push(piece)
        assert all(shown.find(stop) < 0 for stop in stops)
    return shown + ("" if stream.hit else stream.finish()), stream.hit


def cut_before_first_complete_stop(text: str, stops: list[str]) -> str:
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(LETTERS, STOPS, st.data())
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = cut_before_first_complete_stop(text, stops)
    assert run(stops, pieces) == (expected, expected != text)


def test_what_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    stream = StopStrings(["STOP"])
    assert [stream.push(piece) for piece in ("go S", "TO", "RE S", "T")] == ["go ", "", "STORE ", ""]
    assert stream.finish() == "ST"


def test_nothing_is_shown_after_a_stop() -> None:
    stream = StopStrings(["."])
    assert (stream.push("One. Two"), stream.hit, stream.push(" more")) == ("One", True, "")


def utf8(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_stop_string_is_found_across_split_characters() -> None:
    text = TextStream(Detokenizer(utf8), ["é!"])
    shown = [text.push(byte) for byte in "café! no".encode()[:7]]
    assert "".join(shown) == "caf"
    assert text.stopped
    assert text.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    text = TextStream(Detokenizer(utf8))
    assert "".join(text.push(byte) for byte in "né".encode()[:2]) == "n"
    assert text.finish() == "\ufffd"


def test_without_a_detokenizer_there_is_no_text() -> None:
    text = TextStream(None)
    assert (text.push(5), text.finish(), text.stopped) == ("", "", False)
