"""/tokenize and /detokenize, in the shape of vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from photon_ext.checks import check_ids
from photon_ext.errors import RequestError
from photon_ext.models.text.chat_options import ChatOptions
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import Fields, JsonObject, Many
from photon_ext.serve.http.messages import Message
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.respond import Json

_MOST_TOKENS = 2**20


class TokenizeRequest(Fields):
    """A text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=_MOST_TOKENS, fail_fast=True)]


class TokenizeEndpoints:
    """Text to ids, and back."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        self._model.adapter(body.model)
        texts = self._model.texts
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give one of prompt and messages", "prompt")
        if body.prompt is not None:
            ids = await texts.encode(body.prompt, body.add_special_tokens is not False)
        else:
            assert body.messages is not None
            goes_on = bool(body.continue_final_message)
            options = ChatOptions.of((), body.chat_template_kwargs, goes_on, False)
            told = [message.told(texts.speaks_of_developers) for message in body.messages]
            generation = body.add_generation_prompt is not False
            chat = await texts.encode_chat(told, options, generation, request.state.size)
            ids = chat.ids
        names = None
        if body.return_token_strs:
            names = [self._model.names.name(token).text for token in ids]
        return Json(
            {
                "count": len(ids),
                "max_model_len": texts.max_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        self._model.adapter(body.model)
        size = self._model.client.model.vocab_size
        check_ids("tokens", body.tokens, size, RequestError)
        return Json({"prompt": await self._model.texts.decode(body.tokens)})
