"""The HTTP server on many GPUs and machines: replicas of Ray Serve, each with an engine of its own.

One machine: pip install 'ray[serve]' beside photon_ext, then, for two replicas on its CPU,

    python -m photon_ext.examples.ray_serve --model smollm2 --device cpu --max-replicas 2

A cluster: `ray start --head` on one machine and `ray start --address HEAD:6379` on the others. All
have the same Python environment and find the model by the same name. On the first machine:

    RAY_ADDRESS=auto python -m photon_ext.examples.ray_serve --model qwen3-0.6b --device cuda \\
        --max-replicas 8 --host 0.0.0.0

A replica on CUDA reserves one GPU. There are as many replicas as the requests that run and wait in
the engines need, by `--target` for each, between `--min-replicas` and `--max-replicas`.
Ray's own ports (not this one) listen on all addresses and ask for no key: keep them behind a
firewall.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext

from photon_ext.models.loading.model_files import resolve_model
from photon_ext.serve import EngineClient, ServeSettings
from photon_ext.serve.app import make_app
from photon_ext.serve.http.gate import Gate

MAX_WAITING = 512  # requests that wait in one engine; those beyond are answered by 429
LAST_WORDS_S = 1.0  # once its engine is gone: to tell the clients of a replica
REQUESTS = "photon_requests"


def queue_length(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """How many replicas the requests in all engines need; Ray keeps its bounds and delays."""
    lengths = context.aggregated_metrics.get(REQUESTS, {})
    if not lengths:  # none has told of itself yet
        return context.target_num_replicas, {}
    return sum(lengths.values()) / context.config.get_target_ongoing_requests(), {}


@serve.ingress()
class Replica:
    """An engine in a process of its own, and the app in front of it in Ray's. They end together."""

    def __init__(self, model: str, name: str, options: dict[str, Any]) -> None:
        settings = ServeSettings(model, str(resolve_model(model)), (name,))
        self._client = EngineClient.start(model, max_waiting=MAX_WAITING, **options)
        self._app = make_app(self._client, settings)

    async def __serve_build_asgi_app__(self) -> Gate:
        await self._client.ready()
        self._client.on_lost = self._end_soon
        return self._app

    def _end_soon(self) -> None:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    async def check_health(self) -> None:
        """Ray sends requests to a replica once this has returned, and ends one where it raises."""
        while not self._app.ready():
            health = self._client.health()
            if not health.ok:
                raise RuntimeError(f"the engine is {health.state}: {health.why}")
            await asyncio.sleep(0.02)  # the app's tokenizer is being read

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests in this engine, waiting ones included."""
        return {REQUESTS: (await self._client.stats())["live"]}

    async def __del__(self) -> None:
        self._client.on_lost = lambda: None
        await self._client.close()


def application(
    model: str,
    name: str,
    device: str = "auto",
    autoscaling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """For `serve.run`.

    Args:
        model, device, options: see Engine.from_pretrained.
        name: the model's, in requests.
        autoscaling: of ray.serve.config.AutoscalingConfig; `target_ongoing_requests` is how many
            requests an engine should have, running or waiting. None: one replica.
    """
    config = {**(autoscaling or {}), "policy": {"policy_function": queue_length}}
    deployment = serve.deployment(
        max_ongoing_requests=2 * MAX_WAITING,  # they wait in the engine, which knows their order
        health_check_period_s=2,
        graceful_shutdown_timeout_s=60,
        ray_actor_options={"num_gpus": 1 if device.startswith("cuda") else 0},
        autoscaling_config=config,
    )
    return deployment(Replica).bind(model, name, {"device": device, **options})


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Replicas of the HTTP server, by Ray Serve.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto", help="cuda: one GPU for each replica")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=1)
    parser.add_argument("--target", type=int, default=32, help="requests in an engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args(argv)

    serve.start(http_options={"host": given.host, "port": given.port})
    autoscaling = {
        "min_replicas": given.min_replicas,
        "max_replicas": given.max_replicas,
        "target_ongoing_requests": given.target,
    }
    serve.run(application(given.model, given.model, given.device, autoscaling), blocking=True)


if __name__ == "__main__":
    main()
