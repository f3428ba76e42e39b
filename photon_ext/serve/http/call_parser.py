"""CallParser: text and calls of tools, told apart as they come."""

from __future__ import annotations

from enum import Enum

from photon_ext.serve.http.call_reader import CallReader, Reading
from photon_ext.serve.http.parts import Part, Said
from photon_ext.serve.http.tool_formats import ToolFormat

_ARGS = "[ARGS]"
_BETWEEN = "[],;"


class _Mode(Enum):
    TEXT = "text"
    BETWEEN = "between calls, behind a mark"
    CALL = "within a call"


class CallParser:
    """For one format. Text around calls is said; blanks beside a call are not. What begins like a
    call and is none is said, too. A call that has begun is told, and cannot be taken back where the
    answer breaks off: whoever has the whole text asks `calls_in` of sampling/tools.py.

    Attributes:
        called: a call has begun.
        full: no more calls are wanted, and the last one is complete.
    """

    thinking = False

    def __init__(self, form: ToolFormat, most: int | None = None) -> None:
        """`most`: how many calls are wanted; None: any number."""
        self.called = self.full = False
        self._form = form
        self._most = most
        self._mode = _Mode.TEXT
        self._pending = ""
        self._blank: str | None = ""  # blanks at the begin or behind a call; None: text has come
        self._raw = ""  # since the mark, as long as no call has come
        self._reader: CallReader | None = None
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        steps = {
            _Mode.TEXT: self._read_text,
            _Mode.BETWEEN: self._read_between,
            _Mode.CALL: self._read_call,
        }
        while self._pending and not self.full and steps[self._mode](parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self.full:
            return parts
        if self._reader is not None and not self._reader.begun:
            self._raw += self._reader.text
        rest, self._pending = self._pending, ""
        if self._mode is _Mode.TEXT:
            self._say(rest, parts)
        elif self._raw:
            self._say(self._raw + rest, parts)
        if self._blank and not self.called:
            parts.append(Said(self._blank))
        return parts

    # --- each reads on, and says whether there may be more to read --------------------------------

    def _read_text(self, parts: list[Part]) -> bool:
        pending = self._pending
        if self._form.bare and self._blank == "" and pending.strip()[:1] == "{":
            self._raw = pending[: pending.index("{")]
            self._begin_object(pending.index("{"))
            return True
        found = [(pending.find(mark), mark) for mark in self._form.begins if mark in pending]
        if found:
            place, mark = min(found)
            self._say(pending[:place], parts)
            self._pending, self._raw = pending[place + len(mark) :], mark
            self._mode = _Mode.BETWEEN
            return True
        held = max((overlap(pending, mark) for mark in self._form.begins), default=0)
        if self._form.bare and self._blank == "" and not pending.strip():
            held = len(pending)  # JSON may follow
        self._pending = pending[len(pending) - held :]
        self._say(pending[: len(pending) - held], parts)
        return False

    def _read_between(self, parts: list[Part]) -> bool:
        pending = self._pending
        for mark in self._form.ends:
            if pending.startswith(mark):
                self._pending, self._mode = pending[len(mark) :], _Mode.TEXT
                return True
        for mark in self._form.begins:
            if pending.startswith(mark):
                self._pending, self._raw = pending[len(mark) :], self._raw + mark
                return True
        if pending[0] == "{":
            self._begin_object(0)
            return True
        if any(mark.startswith(pending) for mark in (*self._form.ends, *self._form.begins)):
            return False
        if pending[0].isspace() or pending[0] in _BETWEEN:
            if self._raw:
                self._raw += pending[0]
            self._pending = pending[1:]
            return True
        if self._form.named and self._raw:
            return self._read_name(parts)
        self._leave(parts)
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        """A name, perhaps [ARGS], and the JSON of arguments."""
        name, brace, _ = self._pending.partition("{")
        plain = name.removesuffix(_ARGS).strip()
        if not all(each.isalnum() or each in "_-.[]" for each in name.strip()):
            self._leave(parts)
            return True
        if not brace:
            return False
        self._begin_object(len(name), plain)
        return True

    def _begin_object(self, place: int, name: str | None = None) -> None:
        self._reader = CallReader(self._calls, self._form.call_id(), name)
        self._pending, self._mode = self._pending[place:], _Mode.CALL

    def _read_call(self, parts: list[Part]) -> bool:
        reader = self._reader
        assert reader is not None
        found, count = reader.feed(self._pending)
        parts += found
        self._pending = self._pending[count:]
        if reader.begun:
            self.called, self._raw = True, ""
        if reader.state is Reading.GOES_ON:
            return False
        self._reader, self._mode = None, _Mode.BETWEEN
        if reader.state is Reading.NO_CALL:
            self._raw += reader.text
            self._leave(parts)
        else:
            self._calls += 1
            self._raw, self._blank = "", ""
            self.full = self._calls == self._most
        return True

    def _leave(self, parts: list[Part]) -> None:
        """What follows is text; so is what looked like a call, and is none."""
        raw, self._raw, self._mode = self._raw, "", _Mode.TEXT
        if raw:
            self._say(raw, parts)

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._blank is not None:
            if not text.strip():
                self._blank += text
                return
            text = text if self.called else self._blank + text
            self._blank = None
        if text:
            parts.append(Said(text))


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text are the begin of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
