"""`photon-ext serve`: an HTTP port in front of an engine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from photon_ext.checks import check_count
from photon_ext.cli.engine_flags import engine_options
from photon_ext.cli.terminal import complain, say
from photon_ext.errors import ConfigError, describe, shown
from photon_ext.models.loading.model_files import resolve_model
from photon_ext.serve.settings import EngineSettings, HttpSettings, ServeSettings
from photon_ext.serve.supervisor import Supervisor

API_KEYS = "PHOTON_API_KEY"
PACKAGES = (
    "msgspec",
    "uvicorn",
    "uvloop",
    "httptools",
    "fastapi",
    "pydantic",
    "prometheus_client",
)
MAX_WAITING = 512  # unless --max-waiting says otherwise: a server's queue has an end
_BACKLOG = 2048


def run(arguments: argparse.Namespace) -> int:
    """Runs until SIGTERM or Ctrl-C, or until the engine ends; returns an exit code."""
    began = time.monotonic()
    logging.basicConfig(format="photon-ext serve: %(message)s")
    logging.getLogger("photon_ext").setLevel(logging.INFO)  # of others' libraries, warnings
    _check_packages()
    engine = _engine_settings(arguments)
    settings = _http_settings(arguments)
    listening = _bound(settings)
    settings = replace(settings, port=listening.getsockname()[1])
    if arguments.in_process:
        return _run_in_process(engine, settings, listening, began)
    http = HttpSettings(settings, listening, arguments.drain_timeout)
    supervisor = Supervisor(engine, http, partial(_tell_ready, settings, began))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: supervisor.stop(number))
    code = supervisor.run()
    if supervisor.why:
        complain(f"photon-ext serve: {supervisor.why}")
    return code


def _run_in_process(
    engine: EngineSettings, settings: ServeSettings, listening: socket.socket, began: float
) -> int:
    from photon_ext.serve.client import EngineClient
    from photon_ext.serve.home import LocalHome
    from photon_ext.serve.http_process import serve_in_process

    home = LocalHome(engine.model, engine.options, engine.adapters)
    client, card = EngineClient(home.client_socket(), home), asdict(home.card)
    serve_in_process(
        client, replace(settings, workers=1), listening, lambda: _tell_ready(settings, began, card)
    )
    return 0


def _engine_settings(arguments: argparse.Namespace) -> EngineSettings:
    options = engine_options(arguments)
    options |= {name: getattr(arguments, name) for name in ("device", "dtype", "quantize")}
    options.setdefault("max_waiting", MAX_WAITING)
    adapters = dict(map(_named_path, arguments.lora))
    if adapters or arguments.lora_dir is not None:
        options.setdefault("lora_slots", max(len(adapters), 1))
    return EngineSettings(
        arguments.model,
        options,
        adapters,
        form_seconds=arguments.form_timeout,
        frozen_s=arguments.engine_timeout,
    )


def _http_settings(arguments: argparse.Namespace) -> ServeSettings:
    """Raises ConfigError, ModelError."""
    if arguments.lora_dir is not None and not Path(arguments.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir {shown(arguments.lora_dir)} is no directory; name one")
    if arguments.chat_template is not None and not Path(arguments.chat_template).is_file():
        raise ConfigError(f"--chat-template {shown(arguments.chat_template)} is no file; name one")
    keys = arguments.api_key or os.environ.get(API_KEYS, "").split()
    if not all(map(str.strip, keys)):
        raise ConfigError(
            "--api-key is empty, which every request would bring; give a key, or leave it out"
        )
    workers = default_workers()
    if arguments.http_workers is not None:
        workers = check_count("--http-workers", arguments.http_workers)
    return ServeSettings(
        model=arguments.model,
        path=str(resolve_model(arguments.model)),
        served_names=tuple(arguments.served_model_name or [_short(arguments.model)]),
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        lora_dir=arguments.lora_dir,
        chat_template=arguments.chat_template,
        app=arguments.app,
        tool_parser=arguments.tool_parser,
        max_body=arguments.max_body,
        access_log=arguments.access_log,
        engine_timeout=arguments.engine_timeout,
        workers=workers,
    )


def default_workers() -> int:
    """HTTP processes: one takes some 100,000 tokens a second; the engine needs cores, too."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def _bound(settings: ServeSettings) -> socket.socket:
    """The socket, where connections wait until there is an HTTP process. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        where = f"--host {settings.host} --port {settings.port}"
        raise ConfigError(f"{where}: {describe(error)}; give others") from error
    sock.listen(_BACKLOG)
    return sock


def _tell_ready(settings: ServeSettings, began: float, card: dict[str, Any]) -> None:
    seconds = time.monotonic() - began
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}"
    asked = {
        "model": settings.served_names[0],
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }
    key = ' -H "Authorization: Bearer $PHOTON_API_KEY"' if settings.api_keys else ""
    say(f"ready in {seconds:.1f} s: {card['model']} on {card['device']} at {url}")
    say(
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(asked)}'"
    )


def _named_path(text: str) -> tuple[str, str]:
    """Raises ConfigError."""
    name, is_named, path = text.partition("=")
    if not (name and is_named and path):
        raise ConfigError(f"--lora {shown(text)}; give name=directory")
    return name, path


def _short(model: str) -> str:
    """The last part of a path; else the name as it is."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else model


def _check_packages(names: Iterable[str] = PACKAGES) -> None:
    """Raises ConfigError."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"serve needs {', '.join(missing)}, not installed; pip install {' '.join(missing)}"
        )
