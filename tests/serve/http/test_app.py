"""What a server says of itself: models, states, its document, its log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import photon_ext
from tests.serve.http.server import CHAT, HELLO, says, served
from tests.serve.http.stub import StubClient


def got(model_dir: Path, path: str, client: StubClient | None = None) -> Any:
    async def asked() -> Any:
        async with served(client or StubClient(says("Hi")), model_dir) as http:
            return await http.get(path)

    return asyncio.run(asked())


def test_models_and_adapters_are_listed(model_dir: Path) -> None:
    models = got(model_dir, "/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in models] == [
        ("stub", None),
        ("alias", None),
        ("poet", "stub"),
    ]
    assert got(model_dir, "/v1/models/poet").json()["max_model_len"] == 512


def test_states_are_told(model_dir: Path) -> None:
    assert got(model_dir, "/health").json() == {"status": "ready", "why": ""}
    assert got(model_dir, "/ready").status_code == 200
    assert got(model_dir, "/version").json() == {"version": photon_ext.__version__}


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(model_dir: Path) -> None:
    """What it does is tested in a browser, in page/."""

    async def asked() -> Any:
        async with served(StubClient(says("Hi")), model_dir, api_keys=("key",)) as http:
            return await http.get("/")

    page = asyncio.run(asked())
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert not [rule for rule in policy if "unsafe" in rule or "http" in rule or "*" in rule]
    assert re.findall("https?://[^'\"]*", page.text) == ["http://www.w3.org/2000/svg"]  # a name


def test_metrics_have_the_names_that_dashboards_know(model_dir: Path) -> None:
    text = got(model_dir, "/metrics").text
    label = '{model_name="stub"}'
    for name, value in (
        ("vllm:num_requests_running", "0.0"),
        ("vllm:generation_tokens_total", "5.0"),
        ("vllm:kv_cache_usage_perc", "0.25"),
        ("vllm:prefix_cache_hits_total", "0.0"),
    ):
        assert f"{name}{label} {value}\n" in text
    assert 'photon_step_gap_seconds{quantile="0.99"} 7e-06\n' in text
    assert 'vllm:request_success_total{finished_reason="abort",model_name="stub"} 1.0\n' in text
    client = StubClient(says("Hi"), state="gone")
    assert got(model_dir, "/metrics", client).status_code == 503


def test_the_dashboard_asks_for_what_is_told(model_dir: Path) -> None:
    told = set(re.findall(r"^([a-z0-9_:]+)", got(model_dir, "/metrics").text, re.MULTILINE))
    dashboard = json.loads((Path(photon_ext.__file__).parent / "serve/grafana.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for one in targets for name in re.findall(r"(?:vllm:|photon_)\w+", one["expr"])}
    assert len(asked) > 20
    assert asked <= told
    assert all(one["datasource"]["uid"] == "${datasource}" for one in targets)
    assert {one["name"] for one in dashboard["templating"]["list"]} == {"datasource", "model"}


def test_a_tokenizer_that_cannot_be_read_is_not_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def told() -> None:
        while "tokenizer.json" not in caplog.text:
            await asyncio.sleep(0.005)

    async def asked() -> None:
        client = StubClient(says("Hi"), state="starting")
        async with served(client, tmp_path) as http:
            client.state = "ready"
            await asyncio.wait_for(told(), 60)
            assert (await http.get("/ready")).status_code == 503
            assert (await http.post(CHAT, json={"messages": HELLO})).status_code == 503

    asyncio.run(asked())


def test_the_document_names_every_path_and_status(model_dir: Path) -> None:
    found = got(model_dir, "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= {*found["paths"]}
    chat = found["paths"][CHAT]["post"]["responses"]
    assert {*chat} == {"200", "400", "401", "404", "413", "415", "429", "503"}


def test_each_request_has_a_line_in_the_log(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "photon_ext.access")

    async def asked() -> None:
        async with served(StubClient(says("Hi", cached=3)), model_dir) as http:
            headers = {"x-request-id": "mine-1"}
            response = await http.post(CHAT, json={"messages": HELLO}, headers=headers)
            assert response.headers["x-request-id"] == "mine-1"
            await http.post(CHAT, json={"messages": 3})

    asyncio.run(asked())
    lines = [json.loads(each.message) for each in caplog.records if each.name.endswith("access")]
    first, second = [line for line in lines if line["path"] == CHAT]
    assert (first["id"], first["status"], first["completion_tokens"]) == ("mine-1", 200, 3)
    assert (first["cached_tokens"], first["finish_reasons"]) == (3, ["stop"])
    assert second["status"] == 400
    assert second["id"].startswith("req_")
