"""What `photon-ext serve` was asked for, as far as HTTP processes need it."""

from __future__ import annotations

from dataclasses import dataclass

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
