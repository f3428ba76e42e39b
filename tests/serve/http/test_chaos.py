"""A server among hostile clients: it answers good ones right, and forgets the others."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.serve.http.chaos import KEY, Chaos
from tests.serve.processes import Server, until

REQUESTS = int(os.environ.get("PHOTON_CHAOS_REQUESTS", "300"))
SEED = int(os.environ.get("PHOTON_CHAOS_SEED", "0"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
GROWTH_KB = 24 * 1024  # of a process behind its first round: allocators settle, and a leak does not
EMPTY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "photon_rows_held",
    "photon_pages_held",
    "photon_automata_held",
)


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[Server]:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    line = ["--http-workers", "2", "--api-key", KEY, "--form-timeout", "20", "--max-rows", "8"]
    line += ["--max-waiting", "40", "--chat-template", str(template)]
    with Server(model, *line, app=None) as started:
        yield started


def is_empty(server: Server) -> bool:
    """Whether nothing runs or waits, and no row, page or automaton is held."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = [re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M) for name in EMPTY]
    return all(found is not None and float(found[1]) == 0 for found in values)


def memory(server: Server) -> dict[int, int]:
    """Resident kB of the processes that no request may end."""
    kept = [*server.children("engine_process"), *server.children("http_process")]
    status = {pid: Path(f"/proc/{pid}/status").read_text() for pid in [server.process.pid, *kept]}
    return {pid: int(text.split("VmRSS:")[1].split()[0]) for pid, text in status.items()}


@pytest.mark.slow("some hundred requests on connections of their own")
def test_hostile_clients_leave_nothing_behind(server: Server) -> None:
    """PHOTON_CHAOS_REQUESTS and PHOTON_CHAOS_SEED: how many, and which."""
    chaos = Chaos(server.port, SEED)
    first = REQUESTS // 3
    asyncio.run(chaos.alone())
    asyncio.run(chaos.run(range(first)))
    until(lambda: is_empty(server))
    before = memory(server)
    asyncio.run(chaos.run(range(first, REQUESTS)))
    until(lambda: is_empty(server))
    after = memory(server)
    asyncio.run(chaos.alone())
    print(chaos.statuses, {pid: after.get(pid, 0) - kb for pid, kb in before.items()})
    assert chaos.faults == []
    assert chaos.right == len(range(0, REQUESTS, 5))
    assert {200, 400, 401, 404} <= chaos.statuses.keys()
    assert before.keys() == after.keys()
    assert all(after[pid] - kb < GROWTH_KB for pid, kb in before.items()), (before, after)
    others = [
        line for line in server.log if not re.match(r"\{|ready |curl |WARNING:  Invalid", line)
    ]
    assert not others, "\n".join(others)
    server.process.terminate()
    assert server.ended(20) == 0
