"""ServedModel: the model of this server, with its names, its texts and its engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from photon_ext.models.text.model_tokenizer import model_tokenizer
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.serve.contract import Client, EngineGone, EngineStarting
from photon_ext.serve.http.errors import ApiError
from photon_ext.serve.http.texts import Texts
from photon_ext.serve.http.token_names import TokenNames
from photon_ext.serve.settings import ServeSettings


class ServedModel:
    """
    Attributes:
        client: the engine's.
        settings: of this server.
    """

    def __init__(self, client: Client, settings: ServeSettings) -> None:
        self.client = client
        self.settings = settings
        self._tokenizer: Tokenizer | None = None
        self._texts: Texts | None = None
        self._names: TokenNames | None = None

    async def load(self) -> None:
        """Reads the tokenizer, on another thread, while the engine starts. Raises ModelError."""
        template = self.settings.chat_template
        self._tokenizer = await asyncio.to_thread(
            model_tokenizer,
            Path(self.settings.path),
            None if template is None else Path(template),
        )
        self._names = TokenNames(self._tokenizer)

    @property
    def ready(self) -> bool:
        return self._tokenizer is not None and self.client.health().ok

    @property
    def texts(self) -> Texts:
        """Raises EngineStarting, EngineGone."""
        card, health = self.client.model, self.client.health()
        if health.state == "gone":
            raise EngineGone(health.why or "the engine's process has ended")
        if self._tokenizer is None:
            raise EngineStarting("the tokenizer is being read; try again in a moment")
        if self._texts is None:
            self._texts = Texts(self._tokenizer, card.max_len)
        return self._texts

    @property
    def names(self) -> TokenNames:
        """Raises EngineStarting."""
        if self._names is None:
            raise EngineStarting("the tokenizer is being read; try again in a moment")
        return self._names

    @property
    def adapters(self) -> tuple[str, ...]:
        """Raises EngineStarting."""
        return tuple(self.client.model.adapters)

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request means by the model's name; None: the model itself. Raises
        ApiError.
        """
        if name is None or name in self.settings.served_names:
            return None
        if name in self.adapters:
            return name
        there = ", ".join((*self.settings.served_names, *self.adapters))
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; there are {there}",
            param="model",
            code="model_not_found",
        )

    def shown_name(self, adapter: str | None) -> str:
        return self.settings.served_names[0] if adapter is None else adapter
