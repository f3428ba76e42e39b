"""Which parser an answer has, and which special tokens stay in its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.sampling.tools import Tools
from photon_ext.serve.http.call_parser import CallParser
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.parts import AnswerParser, PlainText
from photon_ext.serve.http.thought_parser import BEGIN, END, ThoughtParser
from photon_ext.serve.http.tool_formats import FORCED, FORMATS, format_of


class ParserChoice(NamedTuple):
    """
    Attributes:
        make: a parser for one answer; `tail` is the end of the prompt's text.
        shown: ids of special tokens that stay in the text for it.
    """

    make: Callable[[str], AnswerParser]
    shown: frozenset[int] = frozenset()


PLAIN = ParserChoice(lambda tail: PlainText())


def choose_parser(
    tokenizer: Tokenizer,
    tools: Tools | None,
    parallel: bool,
    apart: bool,
    formed: bool,
    wanted: str | None,
) -> ParserChoice:
    """
    Args:
        tools: of the request. parallel: it takes several calls.
        apart: thoughts are told apart.
        formed: the answer has a form, and so no thought.
        wanted: the format of calls, one of FORMATS; None: the one that the template speaks of.

    Raises ApiError: tools are given, and the format of this model's calls is not known.
    """
    if tools is not None and tools.forced:
        return ParserChoice(lambda tail: CallParser(FORCED))
    if formed:
        return PLAIN
    inner, shown = PlainText, frozenset[int]()
    make: Callable[[], AnswerParser] = inner
    if tools is not None and tools.given:
        name = wanted or format_of(tokenizer)
        if name is None:
            raise bad_request(
                "tools are given, and how this model writes calls is not known: its chat template "
                f"has none of the marks of {', '.join(FORMATS)}; leave them out, force a call by "
                "tool_choice, or start the server with --tool-parser",
                "tools",
            )
        form, most = FORMATS[name], None if parallel else 1
        make, shown = lambda: CallParser(form, most), form.special_ids(tokenizer)
    marks = tokenizer.token_id(BEGIN), tokenizer.token_id(END)
    if not apart or None in marks:
        return ParserChoice(lambda tail: make(), shown)
    shown |= {mark for mark in marks if mark is not None}
    return ParserChoice(lambda tail: ThoughtParser(make(), tail.rstrip().endswith(BEGIN)), shown)
