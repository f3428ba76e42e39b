"""The engine in a process of its own, for servers: `EngineClient` asks it, `photon-ext serve` puts
an HTTP port in front of it.

Nothing here that a client needs imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from photon_ext.serve.contract import (
    Ask,
    BadAsk,
    Busy,
    Client,
    Delta,
    End,
    EngineGone,
    EngineStarting,
    Generation,
    Health,
    ModelCard,
    Scores,
    TokenScore,
)
from photon_ext.serve.settings import ServeSettings

if TYPE_CHECKING:
    from photon_ext.serve.client import EngineClient

__all__ = [
    "Ask",
    "BadAsk",
    "Busy",
    "Client",
    "Delta",
    "End",
    "EngineClient",
    "EngineGone",
    "EngineStarting",
    "Generation",
    "Health",
    "ModelCard",
    "Scores",
    "ServeSettings",
    "TokenScore",
]


def __getattr__(name: str) -> Any:
    if name != "EngineClient":
        raise AttributeError(f"module 'photon_ext.serve' has no attribute {name!r}")
    from photon_ext.serve.client import EngineClient  # needs msgspec, which settings do not

    return EngineClient
