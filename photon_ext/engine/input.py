"""From what a caller asks to a sequence that can run; everything that is wrong with a request
shows here, once, on the caller's thread, before it is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from photon_ext.checks import Limits
from photon_ext.engine.output import TextReader
from photon_ext.engine.prompts import Prompt, encode_prompt
from photon_ext.engine.request import Request
from photon_ext.engine.stop_strings import StoppedText
from photon_ext.errors import ConfigError, RequestError, describe, shown
from photon_ext.runtime.admission import check_admission
from photon_ext.sampling import Constraint, SamplingParams
from photon_ext.sampling.constraints import constraint_fault
from photon_ext.scheduling import Sequence

if TYPE_CHECKING:
    from photon_ext.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Submission:
    """A checked request on its way to the engine thread.

    Attributes:
        sequence: what is scheduled.
        request: what the caller holds.
        text: makes the text on the engine thread, for stop strings; None: readers make it.
        cut: the context leaves less than max_new_tokens.
    """

    sequence: Sequence
    request: Request
    text: StoppedText | None
    cut: bool


@dataclass(frozen=True)
class InputProcessor:
    """Makes submissions; usable from any thread.

    Attributes:
        tokenizer: None serves token ids only.
        eos_ids: the model's end tokens.
        limits: what a row can hold.
        fit: (prompt tokens, max_new_tokens) -> the cap within the context; raises RequestError for
            what can never fit.
        cancel: what Request.cancel calls.
        check_wait: what a request calls before it waits.
        read: the requests that somebody reads.
    """

    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    limits: Limits
    fit: Callable[[int, int], int]
    cancel: Callable[[Request], None]
    check_wait: Callable[[], None]
    read: set[Request]

    def make(self, prompt: Prompt, params: SamplingParams | None, raw: bool) -> Submission:
        """One submission, not queued yet.

        Raises:
            RequestError, ConfigError: what is wrong with the prompt or the parameters.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params is a {type(params).__name__}; give SamplingParams(...)")
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"stop holds {shown(params.stop[0])}, and this engine has no tokenizer; use "
                "stop_token_ids"
            )
        ids = encode_prompt(prompt, self.tokenizer, raw)
        cap = self.fit(len(ids), params.max_new_tokens)
        stops = dict.fromkeys(
            (*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids)
        )
        admission = check_admission(self.limits, ids, params.row_params(cap, tuple(stops)))
        constraint, text = _started(params.constraint), self._stopped_text(params)
        request = Request(self.cancel, self.check_wait, self._reader, self.read, len(ids))
        sequence = Sequence(
            admission, constraint, request, constraint is not None or text is not None
        )
        return Submission(sequence, request, text, cap < params.max_new_tokens)

    def _reader(self) -> TextReader:
        return TextReader(None if self.tokenizer is None else self.tokenizer.detokenizer())

    def _stopped_text(self, params: SamplingParams) -> StoppedText | None:
        stops = params.stop_automaton
        if stops is None or self.tokenizer is None:
            return None
        return StoppedText(self.tokenizer.detokenizer(), stops)


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
