"""Server-sent events, as they come over a connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event.

    Args:
        lines: of a body, cut behind each line feed and nowhere else: where the network has cut, in
            the middle of a character perhaps, is not to be seen.

    https://html.spec.whatwg.org/multipage/server-sent-events.html: data may have several lines;
    comments and other fields are passed over, and an event that is cut off, too. A lone CR ends no
    line here: JSON has none.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
