"""ChatRun: a conversation goes to the engine, and its answers come back in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from photon_ext.models.text.chat_options import ChatOptions
from photon_ext.sampling.tools import Tools
from photon_ext.serve.contract import Delta
from photon_ext.serve.http.answer import Answer, Piece
from photon_ext.serve.http.asking import make_asks
from photon_ext.serve.http.chat_request import ChatRequest
from photon_ext.serve.http.choose_parser import choose_parser
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.parts import AnswerParser, Part
from photon_ext.serve.http.run import Numbered, Run
from photon_ext.serve.http.texts import ChatPrompt
from photon_ext.serve.http.token_names import TokenNames
from photon_ext.serve.http.usage import Usage


class Turn(NamedTuple):
    """What one token added to an answer.

    Attributes:
        parts: often one, sometimes none.
        scored: JSON of its log-probability, see TokenNames.chat_entry; None: it was not asked for.
        finish_reason: of an answer's last turn, else None.
    """

    parts: list[Part]
    scored: str | None = None
    finish_reason: str | None = None


class ChatAnswer:
    """
    Attributes:
        answer: its text and its end.
        reasoning: how many of its tokens were thoughts.
    """

    def __init__(
        self, answer: Answer, parser: AnswerParser, names: TokenNames, top: int | None
    ) -> None:
        """`top`: see ChatRequest.top."""
        self.answer = answer
        self.reasoning = 0
        self._parser = parser
        self._names = names
        self._top = top

    def take(self, delta: Delta) -> list[Turn]:
        """Raises AnswerFailed, RequestError."""
        turns = []
        pieces = self.answer.take(delta)
        for count, piece in enumerate(pieces, 1):
            turns.append(self._turn(piece))
            if self._parser.full:
                self.answer.stop(sum(each.token is not None for each in pieces[count:]))
                break
        if self.answer.end is not None:
            turns.append(Turn(self._parser.finish(), None, self.finish_reason))
        return turns

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words."""
        reason = self.answer.finish_reason
        called = self._parser.full or (reason == "stop" and self._parser.called)
        return "tool_calls" if called and reason is not None else reason

    def _turn(self, piece: Piece) -> Turn:
        self.reasoning += self._parser.thinking and piece.token is not None
        parts = self._parser.feed(piece.text)
        if piece.score is None or piece.token is None or piece.hidden:
            return Turn(parts)
        assert self._top is not None
        return Turn(parts, self._names.chat_entry(piece.token, piece.score, self._top))


class ChatRun:
    """
    Attributes:
        answers: to the conversation, in order.
        name: of the model, as answers have it.
    """

    def __init__(
        self,
        run: Run,
        answers: list[ChatAnswer],
        prompt: tuple[int, ...],
        name: str,
        scored: bool = False,
    ) -> None:
        """`scored`: log-probabilities of the prompt were asked for."""
        self.answers = answers
        self.name = name
        self.prompt_scores: list[Any] = []
        self.prompt = prompt
        self._scores_due = len(prompt) - 1 if scored else 0
        self._run = run

    @classmethod
    async def start(cls, model: ServedModel, body: ChatRequest, size: int) -> ChatRun:
        """Renders, encodes and asks. `size`: of the body, in bytes. Raises ApiError, PhotonError:
        the request can not be served; see EngineClient.generate.
        """
        body.check_stream()
        adapter, texts = model.adapter(body.model), model.texts
        tools = body.asked_tools()
        form = body.form()
        if tools is not None and tools.forced:
            form = {"json_schema": tools.schema()}
        parser = choose_parser(
            texts.tokenizer,
            tools,
            body.parallel_tool_calls is not False,
            body.separate_reasoning is not False,
            bool(form),
            model.settings.tool_parser,
        )
        prompt = await chat_prompt(model, body, tools, size)
        special = {**form, "logprobs": body.top}
        asks, rules = make_asks([prompt.ids], body, special, body.cap, adapter, model.client.model)
        run = await Run.start(model.client, asks)
        skip = body.skip_special_tokens is not False
        answers = [
            ChatAnswer(
                Answer(texts.tokenizer.detokenizer(skip, parser.shown), rules),
                parser.make(prompt.tail),
                model.names,
                body.top,
            )
            for _ in range(body.answers)
        ]
        scored = body.prompt_logprobs is not None
        return cls(run, answers, prompt.ids, model.shown_name(adapter), scored)

    async def turns(self) -> AsyncGenerator[list[tuple[int, list[Turn]]], None]:
        """What has come of any answer since the last look. Raises EngineGone, AnswerFailed."""
        left, held = len(self.answers), list[tuple[int, Delta]]()
        async with self._run as run, aclosing(run.deltas()) as coming:
            async for deltas in coming:
                held += deltas
                if self._awaits_scores(deltas):
                    continue
                found = []
                deltas, held = held, []
                for index, delta in deltas:
                    one = self.answers[index]
                    if one.answer.end is None:
                        found.append((index, one.take(delta)))
                        left -= one.answer.end is not None
                        if one.answer.cut:
                            run.stop(index)
                yield found
                if not left:
                    return

    def _awaits_scores(self, deltas: Numbered) -> bool:
        """Takes the prompt's scores. Whether more come: an answer that is cut at its stop would end
        their coming.
        """
        for index, delta in deltas:
            if delta.prompt_scores is not None:
                self.prompt_scores += iter(delta.prompt_scores)
            if index == 0 and delta.end is not None:
                self._scores_due = 0
        return len(self.prompt_scores) < self._scores_due

    @property
    def usage(self) -> Usage:
        """So far."""
        answers = [one.answer for one in self.answers]
        reasoning = sum(one.reasoning for one in self.answers)
        return Usage.of(len(self.prompt), answers, len(answers), reasoning)

    def logged(self) -> dict[str, Any]:
        """What the access log says of it."""
        usage = self.usage
        return {
            "model": self.name,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
            "finish_reasons": [one.finish_reason for one in self.answers],
        }


async def chat_prompt(
    model: ServedModel, body: ChatRequest, tools: Tools | None, size: int
) -> ChatPrompt:
    """A conversation, rendered and encoded. Raises as Texts.encode_chat, EngineStarting."""
    texts = model.texts
    messages = [message.told(texts.speaks_of_developers) for message in body.messages]
    generation = body.add_generation_prompt is not False
    return await texts.encode_chat(messages, _options(body, tools), generation, size)


def _options(body: ChatRequest, tools: Tools | None) -> ChatOptions:
    generation, goes_on = body.add_generation_prompt, bool(body.continue_final_message)
    if goes_on and generation and "add_generation_prompt" in body.model_fields_set:
        raise bad_request(
            "continue_final_message and add_generation_prompt are both true; give one of them",
            "continue_final_message",
        )
    given = () if tools is None else tools.given
    return ChatOptions.of(given, body.chat_template_kwargs, goes_on, False)
