"""From what a caller asks to a sequence that can run. All that is wrong with a request shows here,
once, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

from photon_ext.checks import Limits, check_flag, check_ids
from photon_ext.engine.adapters import AdapterRegistry
from photon_ext.engine.embeds import NO_EMBEDS, EmbedsReader
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from photon_ext.engine.request import Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.engine.request_queue import RequestQueue, give_way
from photon_ext.errors import ConfigError, RequestError, describe, shown
from photon_ext.runtime.admission import check_admission
from photon_ext.sampling import Constraint, SamplingParams
from photon_ext.sampling.answer_text import StoppedText, TextReader
from photon_ext.sampling.bad_words import BadWords, WithoutSequences
from photon_ext.sampling.constraints import constraint_fault
from photon_ext.sampling.pattern import NotRegular
from photon_ext.sampling.spatial import ObjectReader
from photon_ext.sampling.token_automaton import TokenAutomaton
from photon_ext.scheduling import Policy, Sequence
from photon_ext.scheduling.policy import checked_key

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer

MOST_BAD_WORDS = 8  # lists of them that are kept: up to some megabytes each


@dataclass(frozen=True)
class InputProcessor:
    """Makes sequences, not queued yet; usable from any thread.

    Attributes:
        tokenizer: None serves token ids only.
        fit: see Scheduler.
        queue: where their requests will be.
        policy: says where each stands among those that wait.
        compiler: makes the constraints of answers with a grammar.
        adapters: those that requests may name.
        embeds: says which embeddings a prompt may have.
        bins: values of a coordinate that the model's region heads have; 0: there are none.
    """

    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    limits: Limits
    fit: Callable[[int, int], int]
    queue: RequestQueue
    policy: Policy
    compiler: GrammarCompiler
    adapters: AdapterRegistry
    embeds: EmbedsReader = NO_EMBEDS
    bins: int = 0

    def make_all(
        self,
        prompts: Seq[Prompt] | Iterator[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        raw: bool,
        options: RequestOptions,
        n: int = 1,
    ) -> list[Sequence[Request]]:
        """``n`` for each prompt. Raises RequestError, ConfigError: the message names the prompt;
        QueueFull, before one is encoded: there is no place for all of them.
        """
        if isinstance(prompts, Iterator):
            prompts = list(prompts)
        elif isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, (bytes, bytearray, memoryview)) or not isinstance(prompts, Seq):
            raise ConfigError(
                f"prompts is a {type(prompts).__name__}; give a list or an iterator of prompts, "
                "for instance generate(['Hello']), or a string"
            )
        if isinstance(params, Seq) and len(params) != len(prompts):
            raise ConfigError(
                f"{len(params)} sampling params for {len(prompts)} prompts; give one for all, or "
                "one for each"
            )
        self.queue.check_room(n * len(prompts))
        made = []
        for index, prompt in enumerate(prompts):
            own = params[index] if isinstance(params, Seq) else params
            try:
                made += self._answers(prompt, own, raw, options, n)
            except (RequestError, ConfigError) as error:
                raise type(error)(f"prompt {index}: {error}") from error.__cause__
            give_way()  # others' requests run meanwhile
        return made

    def make_answers(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        raw: bool,
        options: RequestOptions,
        n: int,
    ) -> list[Sequence[Request]]:
        """``n`` for one prompt, which is encoded once, as its bad words are. Raises as `make`, and
        QueueFull before that: for a request that is refused nothing is encoded.
        """
        self.queue.check_room(n)
        return self._answers(prompt, params, raw, options, n)

    def _answers(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        raw: bool,
        options: RequestOptions,
        n: int,
    ) -> list[Sequence[Request]]:
        check_flag("raw", raw)
        encoded = self._prompts.encode(prompt, raw, options.chat)
        ids = check_ids("the prompt", encoded.ids, self.limits.vocab_size)
        encoded = encoded._replace(ids=ids)  # one tuple for all
        params = _asked(params, options)
        bad = self._bad_words(tuple(params.bad_words))
        return [self._sequence(encoded, params, bad, options, sample) for sample in range(n)]

    def make(
        self, prompt: Prompt, params: SamplingParams | None, raw: bool, options: RequestOptions
    ) -> Sequence[Request]:
        """Raises RequestError, ConfigError: what is wrong with the prompt or the parameters."""
        return self.make_answers(prompt, params, raw, options, 1)[0]

    @cached_property
    def _prompts(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.embeds, self.limits.max_len)

    def _sequence(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        bad: BadWords,
        options: RequestOptions,
        sample: int,
    ) -> Sequence[Request]:
        """``sample``: which of the answers to this prompt it is."""
        params, (ids, embeds) = params.sample(sample), prompt
        objects = ObjectReader.of(options.skill, self.limits.vocab_size, self.bins)
        text = self._stopped_text(params)
        cap = self.fit(len(ids), params.max_new_tokens)
        eos_ids = () if params.ignore_eos else self.eos_ids
        stops = dict.fromkeys((*eos_ids, *params.stop_token_ids))
        row_params = params.row_params(cap, tuple(stops), bad.ids)
        admission = check_admission(self.limits, ids, row_params)
        if embeds is not None:
            if params.prompt_logprobs is not None:
                raise RequestError(
                    "prompt_logprobs are of tokens, and the prompt has embeddings; leave one out"
                )
            admission = admission._replace(prompt_ids=embeds.keyed(admission.prompt_ids))
        if objects is not None and bad.sequences:
            raise RequestError(
                "bad_words holds texts of several tokens, and the answer is objects; leave them out"
            )
        constraint, automaton, constraint_on = self._constraint(params, sample, bad)
        if admission.params.constrained != (constraint is not None):
            changed = replace(admission.params, constrained=constraint is not None)
            admission = admission._replace(params=changed)
        make_text = self._text if objects is None else TextReader
        told = constraint_on, objects, params.include_stop
        request = Request(self.queue, make_text, len(ids), text, *told)
        host_checked = constraint is not None or text is not None
        own_limit = "max_new_tokens" if objects is None else "max_objects"
        limit = "max_len" if cap < params.max_new_tokens else own_limit
        adapter, salt = self.adapters.find(options.lora), options.cache_salt
        root = salt if adapter is None else (salt, adapter.key)
        standing = options.priority, options.deadline
        sequence = Sequence(
            admission, constraint, request, host_checked, limit, root, *standing, adapter
        )
        sequence.automaton = automaton
        sequence.embeds = None if embeds is None else embeds.rows
        sequence.key = checked_key(self.policy, sequence)
        return sequence

    def _constraint(
        self, params: SamplingParams, sample: int, bad: BadWords
    ) -> tuple[Constraint | None, TokenAutomaton | None, str | None]:
        """What keeps the answer to its form, on the host or on the device, and Output.constraint_on
        of it.
        """
        form, own = params.answer_grammar, _started(params.constraint, sample)
        if bad.sequences:
            inner = own if form is None else self.compiler.start(form)
            told = "host: bad_words has texts of several tokens"
            return WithoutSequences(bad.endings, inner), None, told
        if own is not None:
            return own, None, "host: it is an object of the caller"
        if form is None:
            return None, None, None
        try:
            return None, self.compiler.automaton(form), "device"
        except NotRegular as error:
            return self.compiler.start(form), None, f"host: {error}"

    def _text(self) -> TextReader:
        return TextReader(None if self.tokenizer is None else self.tokenizer.detokenizer())

    def _stopped_text(self, params: SamplingParams) -> StoppedText | None:
        if params.stop_automaton is None:
            return None
        if self.tokenizer is None:
            raise RequestError(
                f"stop holds {shown(params.stop[0])}, and this engine has no tokenizer; use "
                "stop_token_ids"
            )
        detokenizer = self.tokenizer.detokenizer()
        return StoppedText(detokenizer, params.stop_automaton, params.include_stop)

    @cached_property
    def _bad_words(self) -> Callable[[tuple[str, ...]], BadWords]:
        """Made once for requests with the same ones: those of a list of prompts, or of a server.
        What it keeps knows the tokenizer alone, so that nothing of an engine is in a cycle.
        """
        return lru_cache(MOST_BAD_WORDS)(partial(_made_bad_words, self.tokenizer))


def _made_bad_words(tokenizer: Tokenizer | None, words: tuple[str, ...]) -> BadWords:
    if words and tokenizer is None:
        raise RequestError(
            f"bad_words holds {shown(words[0])}, and this engine has no tokenizer; use "
            "logit_bias, with -inf for a token id"
        )
    return BadWords.of(words, lambda text: tokenizer.encode(text, False) if tokenizer else ())


def _asked(params: SamplingParams | None, options: RequestOptions) -> SamplingParams:
    """The parameters of a request, with the form that its tools or its skill give the answer."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is a {type(params).__name__}; give SamplingParams(...)")
    if params.object_values:
        raise ConfigError(
            f"object_values is {params.object_values}; ask for objects by skill=, which sets it"
        )
    if options.skill is not None:
        return options.skill.run_with(params)
    return params if options.tools is None else options.tools.constrain(params)


def _started(constraint: Constraint | None, sample: int) -> Constraint | None:
    """What a request takes: a fresh one, where a constraint knows how to make one. Answers after
    the first need one, because the first has the constraint itself.
    """
    if constraint is None:
        return None
    name = type(constraint).__name__
    try:
        fresh = getattr(constraint, "fresh", None)
        made = constraint if fresh is None else fresh()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):  # meant for the caller's thread
        raise
    except BaseException as error:
        raise RequestError(f"fresh() of the constraint {name} raised {describe(error)}") from error
    if made is constraint and sample > 0:
        raise RequestError(
            f"the constraint {name} serves one request at a time, and n is above 1; give it a "
            "method fresh() that makes another, or ask for one answer"
        )
    fault = constraint_fault(made)
    if fault is not None:
        got = "None" if made is None else f"a {type(made).__name__}"
        raise RequestError(
            f"fresh() of the constraint {name} returned {got}; it must return a constraint: {fault}"
        )
    return made
