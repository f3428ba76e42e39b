"""photon_ext.examples.ray_serve on one machine, with Ray's own processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.gateways.load import LONG, Load, Stream, free_port, is_served, post
from tests.serve.processes import ROOT, STARTS_WITHIN_S, kill, until

AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 3,
    "upscale_delay_s": 0.5,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
    "downscale_delay_s": 600.0,
}


@pytest.fixture(scope="module")
def port(model: str) -> Iterator[int]:
    """Of Ray's proxy, in front of one replica and room for another."""
    os.environ.update(
        PYTHONPATH=str(ROOT),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
    )
    import ray
    from ray import serve

    from photon_ext.examples.ray_serve import application

    port = free_port()
    ray.init(
        num_cpus=4,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(model, "tiny", "cpu", AUTOSCALING, max_rows=16))
        until(lambda: is_served(port))
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def engines() -> dict[int, int]:
    """Process ids of replicas, and of the engine of each."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "photon_ext.serve.engine_process" in words:
            parent = int(words[words.index("photon_ext.serve.engine_process") + 1])
            name = Path(f"/proc/{parent}/cmdline").read_text()
            if name.startswith("ray::ServeReplica"):
                found[parent] = int(path.name)
    return found


def serving() -> int:
    """Replicas that are ready for requests."""
    from ray import serve

    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def running(port: int) -> float:
    """Requests with a row, in the one engine that there is."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    return float(line.split()[-1])


def test_a_stream_comes_token_by_token_and_ends_with_its_client(port: int) -> None:
    stream = Stream(port)  # its first token has come, and it runs
    assert running(port) == 1
    stream.leave()
    until(lambda: running(port) == 0)
    assert Stream(port).is_whole()
    assert post(port, unknown=1).status == 400


@pytest.mark.slow("Ray starts replicas, and sees what has died, at intervals of its own")
def test_replicas_come_with_the_queue_and_a_killed_one_loses_its_own_requests_alone(
    port: int,
) -> None:
    assert len(engines()) == 1
    with Load(port, threads=8, tokens=LONG):
        until(lambda: serving() == 2, STARTS_WITHIN_S)
    with Load(port) as load:
        until(lambda: len(load.told) > 20)
        streams = [Stream(port) for _ in range(8)]
        lost = next(iter(engines()))
        kept = {replica: engine for replica, engine in engines().items() if replica != lost}
        kill(lost)
        whole = [stream.is_whole() for stream in streams]
        assert set(whole) == {True, False}, whole
        done = len(load.told)
        until(lambda: len(load.told) > done + 20)
        until(lambda: len(engines()) == 2 == serving(), STARTS_WITHIN_S)  # another one in its place
    assert kept.items() <= engines().items()
    assert len(load.failed) <= 3, load.failed  # one of each thread was there
    with Load(port) as load:
        until(lambda: len(load.told) > 50)
    assert not load.failed


@pytest.mark.slow("Ray starts another replica")
def test_an_engine_that_dies_ends_its_replica_and_another_comes(port: int) -> None:
    before = engines()
    replica, engine = next(iter(before.items()))
    kill(engine)
    until(lambda: replica not in engines() and len(engines()) == 2 == serving(), STARTS_WITHIN_S)
    assert all(one == replica or one in engines() for one in before)
