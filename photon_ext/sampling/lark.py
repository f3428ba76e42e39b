"""What is read in the text of a grammar before llguidance reads it. Each reading is one pass: their
time grows with the text's length and no faster, as no other Python code runs meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from photon_ext.errors import ConfigError, describe

# One that is in this notation has such a line; all others are in llama.cpp's.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
# Texts, expressions and comments, which are passed over, closed or not; group 1: a name in <>.
_LITERAL_OR_NAME = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?!/)(?:\\.|[^/\\\n])*/?|(?://|#).*|(<[^<>\s]+>)'
)
_SCHEMA = re.compile(r"%json[ \t\r\n]*(?=\{)")


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation."""
    return _LARK.search(text) is not None


def with_names(text: str, replaced: Callable[[re.Match[str]], str]) -> str:
    """A grammar in Lark's notation with other names of special tokens. Of a match, group 1 is a
    name in <>, or None: it is to stay.
    """
    return _LITERAL_OR_NAME.sub(replaced, text)


def schemas_in_grammar(text: str) -> Iterator[object]:
    """The JSON schemas behind %json. Those in texts and comments count as well: what ends them the
    library decides. Raises ConfigError: there is no JSON.
    """
    decoder = json.JSONDecoder()
    for match in _SCHEMA.finditer(text):
        try:
            yield decoder.raw_decode(text, match.end())[0]
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"grammar has %json at character {match.start()} with what is no JSON behind it "
                f"({describe(error)}); give a JSON schema there"
            ) from error
