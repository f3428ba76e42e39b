"""TokenNames: tokens and their log-probabilities as answers name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.serve.contract import TokenScore
from photon_ext.serve.http.respond import quoted

LEAST_LOGPROB = -9999.0  # for what is below, as JSON knows no infinity (OpenAI's number)


class TokenName(NamedTuple):
    """
    Attributes:
        text: of the token alone; a part of a character shows as U+FFFD.
        json: the fields "token" and "bytes" of a chat's log-probabilities.
    """

    text: str
    json: str


class TokenNames:
    """Of one tokenizer; each id is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenName] = {}

    def name(self, token: int) -> TokenName:
        found = self._known.get(token)
        if found is None:
            spelled = self._tokenizer.token_bytes(token)
            text = spelled.decode("utf-8", "replace")
            fields = f'"token":{quoted(text)},"bytes":[{",".join(map(str, spelled))}]'
            found = self._known[token] = TokenName(text, fields)
        return found

    def chat_entry(self, token: int, score: TokenScore, top: int) -> str:
        """One of logprobs.content, as JSON; `top`: how many of the likeliest were asked for."""
        own = f'{{{self.name(token).json},"logprob":{shown_logprob(score.logprob)!r}'
        likeliest = (
            f'{{{self.name(each).json},"logprob":{shown_logprob(value)!r}}}'
            for each, value in score.top[:top]
        )
        return f'{own},"top_logprobs":[{",".join(likeliest)}]}}'

    def by_text(self, token: int, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens of a completion, and the token itself."""
        found = {self.name(each).text: shown_logprob(value) for each, value in score.top}
        found.setdefault(self.name(token).text, shown_logprob(score.logprob))
        return found

    def prompt_entries(
        self, ids: Sequence[int], scores: Iterable[TokenScore]
    ) -> list[dict[str, Any] | None]:
        """The field prompt_logprobs: of each token of the prompt, by id; None of the first."""
        return [None, *(self._entry(*each) for each in zip(ids[1:], scores, strict=False))]

    def _entry(self, token: int, score: TokenScore) -> dict[str, Any]:
        places = {each: (place, value) for place, (each, value) in enumerate(score.top, 1)}
        places.setdefault(token, (0, score.logprob))
        return {
            str(each): {
                "logprob": shown_logprob(value),
                "rank": place or None,
                "decoded_token": self.name(each).text,
            }
            for each, (place, value) in places.items()
        }


def shown_logprob(value: float) -> float:
    """What is infinite, or no number, as one that JSON has."""
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB
