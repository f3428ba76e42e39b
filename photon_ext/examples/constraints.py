"""A constraint: the answer is one of a few texts.

python -m photon_ext.examples.constraints --choice Yes --choice No --choice Perhaps
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from photon_ext import Engine, SamplingParams, set_ids


class Choice:
    """Allows the tokens of a few answers. The engine asks it for a mask before each token.

    Args:
        answers: token ids of each answer.
    """

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._all = self._left = [tuple(ids) for ids in answers]
        self._given = 0

    def fresh(self) -> Choice:
        """Each request takes one of its own, so that requests may share the parameters."""
        return Choice(self._all)

    def advance(self, token: int) -> None:
        """Keeps the answers that go on with this token."""
        self._left = [ids for ids in self._left if ids[self._given] == token]
        self._given += 1

    @property
    def finished(self) -> bool:
        """An answer is complete: the request ends here."""
        return any(len(ids) == self._given for ids in self._left)

    def fill_bitmask(self, words: memoryview) -> None:
        """Allows each token that may come."""
        set_ids(words, (ids[self._given] for ids in self._left))


def main(argv: Sequence[str] | None = None) -> None:
    """Asks for one of the choices."""
    parser = argparse.ArgumentParser(description="An answer that is one of a few.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", default="Is the sky blue? Answer with one word.")
    parser.add_argument("--choice", action="append")
    options = parser.parse_args(argv)

    with Engine.from_pretrained(options.model, device=options.device, max_rows=1) as engine:
        assert engine.tokenizer is not None
        encode = engine.tokenizer.encode
        choices = options.choice or ["Yes", "No", "Perhaps"]
        answers = [encode(text, add_special_tokens=False) for text in choices]
        params = SamplingParams(constraint=Choice(answers))
        print(engine.generate([options.prompt], params)[0].text)


if __name__ == "__main__":
    main()
