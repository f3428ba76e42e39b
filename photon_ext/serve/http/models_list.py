"""/v1/models: the model by all its names, and the adapters that requests may name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import Fields
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.respond import Json

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"


class LoadAdapter(Fields):
    """
    Attributes:
        lora_name: how requests name it.
        lora_path: the folder of the adapter: a direct child of the one that the server was started
            with. None: of the same name.
    """

    lora_name: str = Field(pattern=_NAME)
    lora_path: str | None = Field(default=None, pattern=_NAME)


class UnloadAdapter(Fields):
    lora_name: str


class ModelEndpoints:
    """What is served here."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        names = (*self._model.settings.served_names, *self._model.adapters)
        return Json({"object": "list", "data": [self._told(name) for name in names]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._model.adapter(name)
        return Json(self._told(name))

    async def load(self, body: LoadAdapter, request: Request) -> Response:
        """Raises ApiError: there is no such folder; or as Client.load_adapter."""
        name, folder = body.lora_name, body.lora_path or body.lora_name
        path = Path(self._model.settings.lora_dir or "") / folder
        if name in self._model.settings.served_names or not path.is_dir():
            raise bad_request(
                f"there is no adapter {folder!r} to load as {name!r}; name a folder of those that "
                "the server was started with, and another name than the model's",
                "lora_path",
            )
        await self._model.client.load_adapter(name, str(path))
        return Json({"id": name, "status": "loaded"})

    async def unload(self, body: UnloadAdapter, request: Request) -> Response:
        """Raises as Client.unload_adapter."""
        await self._model.client.unload_adapter(body.lora_name)
        return Json({"id": body.lora_name, "status": "unloaded"})

    def _told(self, name: str) -> dict[str, Any]:
        base = self._model.settings.served_names
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "photon_ext",
            "root": self._model.settings.model,
            "parent": None if name in base else base[0],
            "max_model_len": self._model.client.model.max_len,
        }
