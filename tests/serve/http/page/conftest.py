"""A browser for the tests of the page; where there is none, they are left out: `make test-page`
installs what they need.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shutil import which
from typing import Any, Protocol

import pytest

from tests.serve.http.server import on_a_port
from tests.serve.http.stub import StubClient

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
collect_ignore = []
if importlib.util.find_spec("playwright") is None or CHROMIUM is None:
    collect_ignore = ["test_page.py"]


class Opens(Protocol):
    """Opens the page of a server around this engine."""

    def __call__(self, client: StubClient, **settings: Any) -> AbstractContextManager[Any]: ...


@pytest.fixture(scope="module")  # its event loop would be in the way of other tests
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture
def faults() -> list[str]:
    """What went wrong in the tab: errors of scripts, and what its policy has refused."""
    return []


@pytest.fixture
def tab(browser: Any, faults: list[str]) -> Iterator[Any]:
    """An empty tab, in which nothing goes wrong."""

    def hear(said: Any) -> None:
        if "Content Security Policy" in said.text or "Trusted" in said.text:
            faults.append(said.text)

    made = browser.new_page()
    made.set_default_timeout(60_000)
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", hear)
    yield made
    made.close()
    assert faults == []


@pytest.fixture
def opened(tab: Any, model_dir: Path) -> Opens:
    @contextmanager
    def open_page(client: StubClient, **settings: Any) -> Iterator[Any]:
        with on_a_port(client, model_dir, **settings) as address:
            try:
                tab.goto(address)
                if not settings.get("api_keys"):
                    tab.wait_for_selector("#model option", state="attached")
                yield tab
            finally:
                tab.goto("about:blank")  # the server waits for connections to end

    return open_page
