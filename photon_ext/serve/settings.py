"""What `photon-ext serve` was asked for, as far as each of its processes needs it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

TOOL_FORMATS = ("granite", "hermes", "llama3", "mistral", "phi")


@dataclass(frozen=True)
class ServeSettings:
    """Plain data: it goes from the parent to each HTTP process.

    Attributes:
        model: as it was named. path: the directory or .gguf file that this is; known before the
            engine is ready, so that its tokenizer can be loaded meanwhile.
        served_names: the model's names in requests; the first one is in answers.
        host, port: where the socket is bound.
        api_keys: of which a request has to bring one; (): none is asked for.
        lora_dir: the folder whose children requests may load by name; None: they may load none.
        chat_template: a file that replaces the model's own; None: the model's.
        app: "module:function" that makes the ASGI application of a client and these settings.
        tool_parser: the format of calls in answers, one of TOOL_FORMATS; None: the one that the
            chat template speaks of.
        max_body: bytes of a request's body at most.
        access_log: one line of JSON for each request (logger "photon_ext.access").
        engine_timeout: seconds without a sign of life after which the engine counts as frozen.
        worker: number of this HTTP process, from 0 on, of how many `workers`.
    """

    model: str
    path: str
    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    lora_dir: str | None = None
    chat_template: str | None = None
    app: str = "photon_ext.serve.app:make_app"
    tool_parser: str | None = None
    max_body: int = 2**25
    access_log: bool = True
    engine_timeout: float = 30.0
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True)
class EngineSettings:
    """What the engine's process is told; plain data.

    Attributes:
        options: keywords of Engine.from_pretrained.
        adapters: directories of those to be loaded at the start, by name.
        form_seconds, form_bytes: what the compiler of forms may take: for one of them, and besides
            what it has at its start.
        frozen_s: seconds without a sign of life, or a step where there is work, after which the
            engine is ended.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    form_seconds: float = 5.0
    form_bytes: int = 4 * 2**30
    frozen_s: float = 30.0


@dataclass(frozen=True)
class HttpSettings:
    """HTTP processes: what each is told, the socket on which they listen, and how many seconds
    requests in flight get to end after SIGTERM.
    """

    settings: ServeSettings
    socket: socket.socket
    drain_s: float = 60.0
