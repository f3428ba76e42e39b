"""From what a caller asks to a sequence that can run; everything that is wrong with a request
shows here, before it is queued.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from photon_ext.errors import ConfigError, RequestError, describe, shown
from photon_ext.sampling import Constraint, SamplingParams
from photon_ext.sampling.constraints import constraint_fault
from photon_ext.scheduling.prompts import Prompt, encode_prompt
from photon_ext.scheduling.request import Request
from photon_ext.scheduling.sequence import Sequence
from photon_ext.scheduling.text import TextStream

if TYPE_CHECKING:
    from photon_ext.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Intake:
    """Makes sequences; usable from any thread.

    Attributes:
        tokenizer: None serves token ids only.
        vocab_size: ids lie below it.
        eos_ids: the model's end tokens.
        max_stop_ids: stop ids of a request, end tokens included.
        fit: (prompt tokens, max_new_tokens) -> the cap within the context; raises RequestError for
            what can never fit.
        cancel: what Request.cancel calls.
        check_wait: what a request calls before it waits.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_stop_ids: int
    fit: Callable[[int, int], int]
    cancel: Callable[[Request], None]
    check_wait: Callable[[], None]

    def make(self, prompt: Prompt, params: SamplingParams | None, raw: bool) -> Sequence:
        """One sequence, not queued yet.

        Raises:
            RequestError, ConfigError: what is wrong with the prompt or the parameters.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params is a {type(params).__name__}; give SamplingParams(...)")
        prompt_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size, raw)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"stop holds {shown(params.stop[0])}, and this engine has no tokenizer; use "
                "stop_token_ids"
            )
        return Sequence(
            prompt_ids=prompt_ids,
            max_new_tokens=self.fit(len(prompt_ids), params.max_new_tokens),
            stop_ids=self._stop_ids(
                () if params.ignore_eos else self.eos_ids, params.stop_token_ids
            ),
            temperature=params.temperature,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            constraint=_started(params.constraint),
            text=TextStream(
                None if self.tokenizer is None else self.tokenizer.detokenizer(),
                params.stop_automaton,
            ),
            request=Request(self.cancel, self.check_wait),
        )

    def _stop_ids(self, eos_ids: Iterable[int], own: Iterable[int]) -> tuple[int, ...]:
        ids = tuple(dict.fromkeys((*eos_ids, *own)))
        outside = next((token for token in ids if token >= self.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"stop_token_ids holds {shown(outside)}; ids of this model are 0 to "
                f"{self.vocab_size - 1}"
            )
        if len(ids) > self.max_stop_ids:
            raise RequestError(
                f"{len(ids)} stop token ids, the model's own included; a request has "
                f"{self.max_stop_ids} at most (max_stop_ids)"
            )
        return ids


def _started(constraint: Constraint | None) -> Constraint | None:
    """The constraint that a request takes: a fresh one where it knows how to make one.

    It must be one: without it all would be allowed.
    """
    if constraint is None:
        return None
    name = type(constraint).__name__
    try:
        fresh = getattr(constraint, "fresh", None)
        made = constraint if fresh is None else fresh()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        # meant for the caller, whose thread this is
        raise
    except BaseException as error:
        raise RequestError(f"fresh() of the constraint {name} raised {describe(error)}") from error
    fault = constraint_fault(made)
    if fault is not None:
        got = "None" if made is None else f"a {type(made).__name__}"
        raise RequestError(
            f"fresh() of the constraint {name} returned {got}; it must return a constraint: {fault}"
        )
    return made
