"""ChatSettings: what /set can set."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from photon_ext.cli.arguments import NOT_IN_CHATS
from photon_ext.errors import ConfigError, shown
from photon_ext.row_params import SYNONYMS, flags
from photon_ext.sampling.params import SamplingParams

_KINDS = {name: kind for name, (kind, _, _) in flags().items() if name not in NOT_IN_CHATS}
NAMES = (*_KINDS, "stop")


class ChatSettings:
    """
    Attributes:
        given: keywords of SamplingParams that were set, and the defaults of this chat.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`defaults`: what holds for what is not set; besides, who answers has some. Raises
        ConfigError.
        """
        self._defaults = dict(defaults)
        self.given = self._checked({**self._defaults, **given})

    def set(self, name: str, text: str) -> None:
        """`text`: "": as if it had never been set. Raises ConfigError."""
        name = name.replace("-", "_")
        name = name if name in NAMES else SYNONYMS.get(name, name)
        if name not in NAMES:
            raise ConfigError(f"there is no setting {shown(name)}; there are {', '.join(NAMES)}")
        given = {key: value for key, value in self.given.items() if key != name}
        if text:
            given[name] = (text,) if name == "stop" else _number(name, text)
        elif name in self._defaults:
            given[name] = self._defaults[name]
        self.given = self._checked(given)

    def told(self) -> str:
        return ", ".join(
            f"{name} {shown(self.given[name]) if name in self.given else '(not set)'}"
            for name in NAMES
        )

    @staticmethod
    def _checked(given: dict[str, Any]) -> dict[str, Any]:
        SamplingParams(**given)
        return given


def _number(name: str, text: str) -> Any:
    """What is none is refused by the check of all parameters, in its words."""
    with suppress(ValueError):
        return (float if _KINDS[name] is float else int)(text)
    return text
