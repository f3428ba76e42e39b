"""ApiError: what a client is told, in OpenAI's shape, and how errors of the house become one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from photon_ext.errors import PhotonError, QueueFull, shown
from photon_ext.serve.contract import BadAsk, Busy, EngineGone, EngineStarting
from photon_ext.serve.http.answer import AnswerFailed

_LOG = logging.getLogger("photon_ext")
_MOST_FAULTS = 2**12
_RETRY_S = 5  # after which a model may be loaded
_PARAM = re.compile(r"(\w+) (?:is|are|has|have|hold|holds|asks)\b")
# a name of the engine's in its message: what it begins with, or what is no word of a language
_NAMED = re.compile(r"^\w+|\b(?:max_new_tokens|include_stop)\b")
NO_NAMES: Mapping[str, str] = MappingProxyType({})

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message, kind, param, code: the fields of the body, where `kind` is called "type".
        headers: besides those that every answer has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def named(self, names: Mapping[str, str]) -> ApiError:
        """The same, with the request's names of what the engine names otherwise."""
        message = _NAMED.sub(lambda found: names.get(found[0], found[0]), self.message)
        param = None if self.param is None else names.get(self.param, self.param)
        return ApiError(self.status, message, self.kind, param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same in Anthropic's shape."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body_for(self, path: str) -> dict[str, Any]:
        """In the shape that clients of a path read."""
        return self.anthropic_body() if path.startswith("/v1/messages") else self.body()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")


def any_error(error: Exception, names: Mapping[str, str] = NO_NAMES) -> ApiError:
    """What a client is told of an error; a fault of this server is logged. `names`: see
    Fields.engine_names.
    """
    known = _api_error(error)
    if known is not None:
        return known.named(names)
    _LOG.error("a request failed by a fault of the server", exc_info=error)
    return ApiError(500, "a fault of the server; its log tells more", "server_error")


def _api_error(error: Exception) -> ApiError | None:
    """None: it is a fault of this server."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _invalid(error)
        case BadAsk(param=param):
            return bad_request(str(error), param)
        case Busy(retry_after_s=seconds):
            return _later(429, str(error), "rate_limit_error", "queue_full", seconds)
        case QueueFull():
            return _later(429, str(error), "rate_limit_error", "queue_full", 1)
        case EngineStarting():
            return _later(503, str(error), "server_error", "engine_starting", _RETRY_S)
        case EngineGone():
            return _later(503, str(error), "server_error", "engine_gone", _RETRY_S)
        case AnswerFailed():
            return ApiError(503, str(error), "server_error", code="generation_failed")
        case PhotonError() if isinstance(error, ValueError):
            return bad_request(str(error), _param_of(str(error)))
    return None


def status_error(status: int, method: str, path: str) -> ApiError:
    """What frameworks say by a status alone."""
    if status == 404:
        return ApiError(404, f"there is no {method} {path}; see /openapi.json", code="unknown_url")
    if status == 405:
        told = f"{path} does not take {method}; see /openapi.json"
        return ApiError(405, told, code="method_not_allowed")
    return ApiError(status, HTTPStatus(status).phrase)


def _later(status: int, message: str, kind: str, code: str, seconds: int) -> ApiError:
    return ApiError(status, message, kind, code=code, headers={"retry-after": str(seconds)})


def _param_of(message: str) -> str | None:
    """The parameter that an error of the house names first."""
    found = _PARAM.match(message)
    return None if found is None else found[1]


def _invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body; in unions, of the branch that went the deepest."""
    count = error.error_count()
    if count > _MOST_FAULTS:  # to list them would take longer than other clients should wait
        return bad_request(f"the body has {count} faults; see /openapi.json", code="invalid_value")
    faults = error.errors(include_url=False, include_context=False)
    fault = max(faults[:100], key=lambda each: (each["type"] == "not_taken", len(each["loc"])))
    path, rest = _path(fault["loc"]), f"; {len(faults) - 1} more" if len(faults) > 1 else ""
    kind, given = fault["type"], fault.get("input")
    if kind == "json_invalid":
        return bad_request(f"the body is no JSON ({fault['msg']})", code="invalid_json")
    if kind == "extra_forbidden":
        return bad_request(
            f"{path} is no field of this request; leave it out", path, "unknown_parameter"
        )
    if kind == "missing":
        return bad_request(f"{path} is missing; give it", path, "missing_required_parameter")
    if kind in ("not_taken", "value_error"):
        return bad_request(f"{path}: {fault['msg']}", path or None, "unsupported_value")
    expected = fault["msg"].replace("Input should be ", "expected ")
    told = f"{path or 'the body'} is {shown(given)}; {expected}{rest}"
    return bad_request(told, path or None, "invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """A place in a body as clients write it: messages[0].content. Names of a union's branches,
    which pydantic puts into it, are left out; see fields.branch.
    """
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif re.fullmatch(r"[a-z_][a-z0-9_]*", step) and step not in _BRANCHES:
            path += f".{step}" if path else step
    return path


_BRANCHES = {"str", "int", "float", "bool", "dict", "list"}
