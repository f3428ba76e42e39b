"""How soon a caller wants a request to be served."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from photon_ext.checks import INT32_MAX, as_index, check_seconds
from photon_ext.errors import ConfigError, shown


class Urgency(NamedTuple):
    """Checked; `deadline` is in seconds of `time.monotonic`, infinite where there is none."""

    priority: int = 0
    deadline: float = math.inf

    @classmethod
    def of(cls, priority: object, timeout_s: object, deadline: object) -> Urgency:
        """What a call asks for, whose `timeout_s` begins now; the sooner of the two ends counts.

        Raises ConfigError: a value is not allowed.
        """
        number = as_index(priority)
        if number is None or abs(number) > INT32_MAX:
            raise ConfigError(
                f"priority is {shown(priority)}; give an integer from {-INT32_MAX} to {INT32_MAX}, "
                "the higher the sooner"
            )
        ends = [math.inf]
        if timeout_s is not None:
            expected = "seconds >= 0, or None for no timeout"
            ends.append(time.monotonic() + check_seconds("timeout_s", timeout_s, expected))
        if deadline is not None:
            expected = "seconds >= 0 of time.monotonic(), or None for no deadline"
            ends.append(check_seconds("deadline", deadline, expected))
        return cls(number, min(ends))
