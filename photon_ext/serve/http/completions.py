"""/v1/completions: prompts go on, in OpenAI's shape, at once or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from photon_ext.serve.contract import Delta, TokenScore
from photon_ext.serve.http.answer import Answer, Piece
from photon_ext.serve.http.asking import make_asks
from photon_ext.serve.http.completion_request import CompletionRequest
from photon_ext.serve.http.errors import any_error
from photon_ext.serve.http.ids import new_id
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.respond import DONE, EventStream, Json, json_bytes, quoted
from photon_ext.serve.http.run import Run
from photon_ext.serve.http.sampling_fields import StreamOptions
from photon_ext.serve.http.token_names import TokenNames, shown_logprob
from photon_ext.serve.http.usage import Usage


class CompletionEndpoint:
    """Answers prompts."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, body: CompletionRequest, request: Request) -> Response:
        body.check()
        model, texts = self._model, self._model.texts
        adapter, card = model.adapter(body.model), model.client.model
        prompts = [await self._prompt(given, body) for given in body.prompt]
        special = {**body.form(), "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            special["prompt_logprobs"] = body.logprobs
        ids = [prompt.ids for prompt in prompts]
        asks, rules = make_asks(ids, body, special, body.cap, adapter, card)
        if body.echo:
            for prompt in prompts:
                await prompt.spell(model)
        run = await Run.start(model.client, asks)
        skip = body.skip_special_tokens is not False
        choices = [
            _Choice(Answer(texts.tokenizer.detokenizer(skip), rules), prompt)
            for prompt in prompts
            for _ in range(body.answers)
        ]
        made = _Completion(run, choices, prompts, body, model.names, model.shown_name(adapter))
        request.state.log = made.logged
        return EventStream(made.bodies()) if body.stream else Json(await made.whole())

    async def _prompt(self, given: str | list[int], body: CompletionRequest) -> _Prompt:
        await asyncio.sleep(0)  # others' turn, where there are many
        texts = self._model.texts
        if isinstance(given, str):
            ids = await texts.encode(given, body.add_special_tokens is not False)
            return _Prompt(ids, given)
        return _Prompt(texts.checked(tuple(given), "prompt"))


class _Prompt:
    """One of the prompts.

    Attributes:
        text: as echo shows it.
        offsets: where in it each token begins.
        scores: of its tokens from the second on, as far as they have come.
        closed: no more of them come.
    """

    def __init__(self, ids: tuple[int, ...], text: str | None = None) -> None:
        self.ids = ids
        self.text = text or ""
        self.offsets: list[int] = []
        self.scores: list[TokenScore] = []
        self.closed = False
        self._given = text is not None

    async def spell(self, model: ServedModel) -> None:
        """Finds the text of ids, and where in it they are. Raises RequestError."""

        def spelled() -> tuple[str, list[int]]:
            detokenizer = model.texts.tokenizer.detokenizer()
            text, offsets = "", []
            for token in self.ids:
                offsets.append(len(text))
                text += detokenizer.push(token)
            return text + detokenizer.flush(), offsets

        text, self.offsets = await model.texts.run(4 * len(self.ids), spelled)
        if not self._given:
            self.text = text

    @property
    def scored(self) -> bool:
        """All scores are here, or those that come at all: a request may end before."""
        return self.closed or len(self.scores) >= len(self.ids) - 1


class _Scored(NamedTuple):
    """A token as log-probabilities have it. `offset`: where its text begins."""

    token: int
    score: TokenScore | None
    offset: int


class _Choice:
    """One answer.

    Attributes:
        echoed: its prompt was shown.
        offset: characters of its text so far, those of an echoed prompt included.
    """

    def __init__(self, answer: Answer, prompt: _Prompt) -> None:
        self.answer = answer
        self.prompt = prompt
        self.echoed = False
        self.offset = 0

    def echo(self) -> tuple[str, list[_Scored]]:
        """The prompt and its tokens, as what the answer begins with."""
        self.echoed, prompt = True, self.prompt
        self.offset += len(prompt.text)
        scores = [None, *prompt.scores]
        found = zip(prompt.ids, scores, prompt.offsets, strict=False)
        return prompt.text, [_Scored(*each) for each in found]

    def read(self, piece: Piece) -> tuple[str, list[_Scored]]:
        scored = []
        if piece.token is not None and piece.score is not None:
            scored.append(_Scored(piece.token, piece.score, self.offset))
        self.offset += len(piece.text)
        return piece.text, scored


Shown = tuple[str, list[_Scored]]


class _Completion:
    """The answers to all prompts of a request."""

    def __init__(
        self,
        run: Run,
        choices: Sequence[_Choice],
        prompts: Sequence[_Prompt],
        body: CompletionRequest,
        names: TokenNames,
        name: str,
    ) -> None:
        self._run = run
        self._choices = choices
        self._prompts = prompts
        self._body = body
        self._names = names
        self._name = name
        self._fields = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    async def whole(self) -> dict[str, Any]:
        """An answer that is not streamed. Raises EngineGone, AnswerFailed, RequestError."""
        texts: list[list[str]] = [[] for _ in self._choices]
        scored: list[list[_Scored]] = [[] for _ in self._choices]
        async with aclosing(self._shown()) as shown:
            async for found in shown:
                for index, own in found:
                    for text, tokens in own:
                        texts[index].append(text)
                        scored[index] += tokens
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            columns = None if self._body.logprobs is None else self._logprobs(scored[index])
            told = {"index": index, "text": "".join(texts[index]), "logprobs": columns}
            told["finish_reason"] = choice.answer.finish_reason
            told["stop_reason"] = choice.answer.stop_reason
            if self._body.prompt_logprobs is not None:
                prompt = choice.prompt
                told["prompt_logprobs"] = self._names.prompt_entries(prompt.ids, prompt.scores)
            choices.append(told)
        return {**self._fields, "choices": choices, "usage": self._usage.told()}

    async def bodies(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; see chat.py."""
        head = f'data: {json_bytes(self._fields).decode()[:-1]},"choices":['
        options = self._body.stream_options or StreamOptions()
        try:
            async with aclosing(self._shown()) as shown:
                async for found in shown:
                    usage = self._usage_so_far(options)
                    events = [
                        f"{head}{event}]{usage}}}\n\n"
                        for index, own in found
                        for event in self._events(index, own)
                    ]
                    if events:
                        yield "".join(events).encode()
            if options.include_usage:
                usage = json_bytes(self._usage.told()).decode()
                yield f'{head}],"usage":{usage}}}\n\n'.encode()
        except Exception as error:
            yield b"data: %b\n\n" % json_bytes(any_error(error).body())
        yield DONE

    def logged(self) -> dict[str, Any]:
        """What the access log says of it."""
        usage = self._usage
        return {
            "model": self._name,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
            "finish_reasons": [choice.answer.finish_reason for choice in self._choices],
        }

    def _events(self, index: int, shown: Sequence[Shown]) -> list[str]:
        """Of one answer: what waits for text goes with the next event that has some."""
        events, waiting, choice = [], list[_Scored](), self._choices[index]
        for text, tokens in shown:
            waiting += tokens
            if text:
                events.append(self._event(index, text, waiting))
                waiting = []
        reason = choice.answer.finish_reason
        if waiting or reason is not None:
            events.append(self._event(index, "", waiting, reason))
        return events

    def _event(
        self, index: int, text: str, scored: Sequence[_Scored], reason: str | None = None
    ) -> str:
        logprobs = "null"
        if self._body.logprobs is not None:
            logprobs = json_bytes(self._logprobs(scored)).decode()
        finish = "null" if reason is None else f'"{reason}"'
        own = f'"index":{index},"text":{quoted(text)},"logprobs":{logprobs}'
        return f'{{{own},"finish_reason":{finish}}}'

    def _usage_so_far(self, options: StreamOptions) -> str:
        if options.continuous_usage_stats:
            return f',"usage":{json_bytes(self._usage.told()).decode()}'
        return ',"usage":null' if options.include_usage else ""

    async def _shown(self) -> AsyncGenerator[list[tuple[int, list[Shown]]], None]:
        """What has come of any answer since the last look. Raises as `whole`."""
        left, n = len(self._choices), self._body.answers
        held: list[list[Delta]] = [[] for _ in self._choices]
        async with self._run as run, aclosing(run.deltas()) as coming:
            async for deltas in coming:
                touched = set()
                for index, delta in deltas:
                    held[index].append(delta)
                    touched.add(index)
                    prompt = self._choices[index].prompt
                    if delta.prompt_scores is not None:  # the first of n has them for all
                        prompt.scores += iter(delta.prompt_scores)
                        touched.update(range(index, index + n))
                    if delta.end is not None and index % n == 0:
                        prompt.closed = True
                        touched.update(range(index, index + n))
                found = []
                for index in sorted(touched):
                    choice = self._choices[index]
                    if choice.answer.end is None and self._may_show(choice, held[index]):
                        found.append((index, self._take(choice, held[index])))
                        held[index] = []
                        left -= choice.answer.end is not None
                        if choice.answer.cut:
                            run.stop(index)
                yield found
                if not left:
                    return

    def _may_show(self, choice: _Choice, held: Sequence[Delta]) -> bool:
        """Whether the scores of the prompt are here: echo shows them first, and an answer that is
        cut at its stop would end their coming.
        """
        body = self._body
        asked = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        return bool(held) and (choice.prompt.scored or not asked)

    def _take(self, choice: _Choice, deltas: Sequence[Delta]) -> list[Shown]:
        shown = []
        if self._body.echo and not choice.echoed:
            shown.append(choice.echo())
        for delta in deltas:
            shown += [choice.read(piece) for piece in choice.answer.take(delta)]
        return shown

    def _logprobs(self, scored: Sequence[_Scored]) -> dict[str, Any]:
        """In OpenAI's shape: columns."""
        name, by_text = self._names.name, self._names.by_text
        return {
            "tokens": [name(each.token).text for each in scored],
            "token_logprobs": [
                None if each.score is None else shown_logprob(each.score.logprob) for each in scored
            ],
            "top_logprobs": [
                None if each.score is None else by_text(each.token, each.score) for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }

    @property
    def _usage(self) -> Usage:
        answers = [choice.answer for choice in self._choices]
        prompt = sum(len(each.ids) for each in self._prompts)
        return Usage.of(prompt, answers, self._body.answers)
