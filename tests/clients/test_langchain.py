"""langchain's standard tests of a chat model, over the scripted model. The switches of that suite
say what is not supported: images, sound, files.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import KEY


class _Standard(ChatModelIntegrationTests):
    address = ""
    responses = False

    @pytest.fixture(autouse=True)
    def _server(self, scripted_address: str) -> None:
        type(self).address = scripted_address

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        where = {"base_url": f"{self.address}/v1", "api_key": KEY}
        kind = {"use_responses_api": self.responses, "stream_usage": True}
        return {"model": "tiny", **kind, **where}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "tiny"


class TestChat(_Standard):
    """/v1/chat/completions."""


class TestResponses(_Standard):
    """/v1/responses."""

    responses = True
