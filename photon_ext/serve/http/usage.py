"""Usage: how many tokens a request has taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from photon_ext.serve.http.answer import Answer


class Usage(NamedTuple):
    """
    Attributes:
        prompt: tokens of all prompts, each counted once.
        cached: of them, those found in cached pages.
        completion: tokens of all answers, up to their stops, stop tokens included.
        reasoning: of them, those of thoughts.
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0

    @classmethod
    def of(cls, prompt: int, answers: Iterable[Answer], n: int, reasoning: int = 0) -> Usage:
        """`n`: answers to each prompt, which share its pages: the first tells of them."""
        cached = completion = 0
        for place, answer in enumerate(answers):
            completion += answer.tokens
            if place % n == 0:
                cached += answer.cached_tokens or 0
        return cls(prompt, cached, completion, reasoning)

    def told(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
