"""make_app: the ASGI app of an HTTP process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from photon_ext import __version__
from photon_ext.serve.contract import Client
from photon_ext.serve.http import documents
from photon_ext.serve.http.anthropic import MessagesEndpoint
from photon_ext.serve.http.chat import ChatEndpoint
from photon_ext.serve.http.completions import CompletionEndpoint
from photon_ext.serve.http.errors import status_error
from photon_ext.serve.http.gate import Gate
from photon_ext.serve.http.metrics import MetricsEndpoint
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.models_list import ModelEndpoints
from photon_ext.serve.http.page import page
from photon_ext.serve.http.respond import Json
from photon_ext.serve.http.responses import ResponsesEndpoint
from photon_ext.serve.http.route import JsonRoute
from photon_ext.serve.http.tokenizing import TokenizeEndpoints
from photon_ext.serve.settings import ServeSettings

_LOG = logging.getLogger("photon_ext")
_ERRORS = {
    400: "The request is not one that can be served.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "As many requests run and wait as the engine takes; try again later.",
    503: "The engine is starting, or gone, or could not make the answer.",
}
_STRING = {"type": "string"}
_EVENT = {"type": "object", "properties": {"data": _STRING, "event": _STRING}, "required": ["data"]}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}  # of each event


def make_app(client: Client, settings: ServeSettings) -> Gate:
    """The app that serves one model over HTTP.

    Its lifespan reads the tokenizer; until that is done, and the engine is ready, all but /health
    and its like is answered by 503.

    Args:
        client: the engine's.
        settings: names of the model, keys, limits.
    """
    model = ServedModel(client, settings)
    app = _App(model)
    gate = settings.api_keys, settings.max_body, settings.access_log
    return Gate(app, *gate, ready=lambda: model.ready)


class _App(FastAPI):
    """The routes."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(
            title="photon_ext",
            version=__version__,
            docs_url=None,  # these pages would load scripts from elsewhere
            redoc_url=None,
            lifespan=_lifespan(model),
            redirect_slashes=False,
        )
        self.router.route_class = JsonRoute
        self.exception_handler(HTTPException)(_told_status)
        self._add_model(model)
        self._add_generation(model)
        self._add_state(model)

    def _add_generation(self, model: ServedModel) -> None:
        chat, completion = ChatEndpoint(model), CompletionEndpoint(model)
        self._post("/v1/chat/completions", chat.answer, documents.ChatCompletion, _EVENTS)
        self._post("/v1/completions", completion.answer, documents.Completion, _EVENTS)
        responses = ResponsesEndpoint(model)
        self._post("/v1/responses", responses.answer, documents.Response, _EVENTS)
        messages, path = MessagesEndpoint(model), "/v1/messages"
        wrong = documents.AnthropicError
        self._post(path, messages.answer, documents.AnthropicMessage, _EVENTS, wrong)
        self._post(f"{path}/count_tokens", messages.count, documents.TokenCount, None, wrong)

    def _add_model(self, model: ServedModel) -> None:
        models, tokens = ModelEndpoints(model), TokenizeEndpoints(model)
        self._get("/v1/models", models.list, documents.ModelList, 401, 503)
        self._get("/v1/models/{model:path}", models.one, documents.ModelBody, 401, 404, 503)
        self._post("/tokenize", tokens.tokenize, documents.Tokens)
        self._post("/detokenize", tokens.detokenize, documents.Detokenized)
        if model.settings.lora_dir is not None:
            self._post("/v1/load_lora_adapter", models.load, documents.AdapterState)
            self._post("/v1/unload_lora_adapter", models.unload, documents.AdapterState)

    def _add_state(self, model: ServedModel) -> None:
        async def health(request: Request) -> Response:
            """Whether the engine runs."""
            found = model.client.health()
            state = {"status": found.state, "why": found.why}
            return Json(state, 200 if found.ok else 503)

        async def ready(request: Request) -> Response:
            """Whether requests are served."""
            found = model.client.health()
            state = {"status": "ready" if model.ready else found.state, "why": found.why}
            if found.ok and not model.ready:
                state = {"status": "starting", "why": "the tokenizer is being read"}
            return Json(state, 200 if model.ready else 503)

        async def version(request: Request) -> Response:
            return Json({"version": __version__})

        self._get("/health", health, documents.State, states=(503,))
        self._get("/ready", ready, documents.State, states=(503,))
        self._get("/version", version, documents.Version)
        self.get("/", include_in_schema=False)(page)
        text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        metrics: dict[int | str, Any] = {200: text}
        self.get("/metrics", response_model=None, responses={**metrics, **_errors((503,))})(
            MetricsEndpoint(model).answer
        )

    def _get(
        self,
        path: str,
        endpoint: Any,
        answer: Any,
        *statuses: int,
        states: tuple[int, ...] = (),
    ) -> None:
        """`states`: statuses that have the answer's shape, too."""
        told: dict[int | str, Any] = {200: {"model": answer}, **_errors(statuses)}
        told |= {status: {"model": answer} for status in states}
        self.get(path, response_model=None, responses=told)(endpoint)

    def _post(
        self,
        path: str,
        endpoint: Any,
        answer: Any,
        streamed: Any = None,
        wrong: Any = documents.ErrorBody,
    ) -> None:
        told = {200: {"model": answer, "content": streamed or {}}, **_errors(_ERRORS, wrong)}
        self.post(path, response_model=None, responses=told)(endpoint)

    def openapi(self) -> dict[str, Any]:
        """The document, without the status 422, which is never answered."""
        if self.openapi_schema is None:
            found = super().openapi()
            for methods in found["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            schemas = found["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return self.openapi_schema or {}


def _errors(statuses: Any, wrong: Any = documents.ErrorBody) -> dict[int | str, Any]:
    return {status: {"model": wrong, "description": _ERRORS[status]} for status in statuses}


def _lifespan(model: ServedModel) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        loading = asyncio.ensure_future(_load(model))
        try:
            yield
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading

    return lifespan


async def _load(model: ServedModel) -> None:
    try:
        await asyncio.gather(model.load(), model.client.ready())
    except Exception:
        _LOG.exception("%s cannot be served", model.settings.path)


async def _told_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = status_error(error.status_code, request.method, request.url.path)
    return Json(told.body_for(request.url.path), told.status, error.headers)
