"""The adapters that requests may name; usable from any thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from photon_ext.errors import ConfigError, RequestError, shown
from photon_ext.scheduling import Registry
from photon_ext.scheduling.adapters import Adapter, AdapterStore


class AdapterRegistry:
    """Adapters by name, each with its copy on the host."""

    def __init__(self, store: AdapterStore | None, requests: Registry[Any]) -> None:
        """`store`: None where the engine has no slots. `requests`: those that have not ended."""
        self._store = store
        self._requests = requests
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are loaded."""
        with self._lock:
            return tuple(self._adapters)

    def load(self, name: str, path: str | Path) -> None:
        """Reads and checks an adapter on the calling thread. Raises as Engine.load_lora."""
        if self._store is None:
            raise ConfigError(
                f"the adapter {shown(name)} has no place: this engine has no slots for adapters; "
                "make it with lora_slots=1 or more"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the adapter's name is {shown(name)}; give a text")
        self._check_new(name)
        adapter = Adapter(name, self._store.read(path))
        with self._lock:
            self._check_new(name)
            self._adapters[name] = adapter

    def unload(self, name: str) -> None:
        """Forgets an adapter. Raises as Engine.unload_lora."""
        with self._lock:
            adapter = self._adapters.get(name) if isinstance(name, str) else None
            if adapter is None:
                raise ConfigError(f"no adapter is named {shown(name)}; {self._known()}")
            if users := sum(one.adapter is adapter for one in self._requests.live):
                raise ConfigError(
                    f"the adapter {shown(name)} is in use by {users} requests; unload it when they "
                    "have ended, or cancel them"
                )
            del self._adapters[name]

    def find(self, name: str | None) -> Adapter | None:
        """The adapter that a request names; None: it names none. RequestError: there is none."""
        if name is None:
            return None
        with self._lock:
            if name not in self._adapters:
                raise RequestError(f"lora is {shown(name)}, and no adapter has it; {self._known()}")
            return self._adapters[name]

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise ConfigError(
                f"an adapter is named {shown(name)} already; unload it first, or give another name"
            )

    def _known(self) -> str:
        if not self._adapters:
            return "none is loaded: load_lora() does that"
        return f"there are {', '.join(map(shown, self._adapters))}"
