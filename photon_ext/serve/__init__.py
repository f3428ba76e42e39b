"""The engine in a process of its own, for servers: `EngineClient` asks it, `photon-ext serve` puts
an HTTP port in front of it.

Nothing here that a client needs imports torch.
"""

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

__all__ = [
    "Ask",
    "BadAsk",
    "Busy",
    "Client",
    "Delta",
    "End",
    "EngineGone",
    "EngineStarting",
    "Generation",
    "Health",
    "ModelCard",
    "Scores",
    "ServeSettings",
    "TokenScore",
]
