"""Who is next, as one order of all requests: the first of those that wait gets a row, the last of
those that run gives its own up where pages run out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from numbers import Integral, Real
from typing import TYPE_CHECKING, Protocol

from photon_ext.errors import ConfigError, RequestError, describe, shown

if TYPE_CHECKING:
    from photon_ext.scheduling.sequence import Sequence

Key = tuple[float, ...]


class Policy(Protocol):
    """An order of requests; write your own class for another one."""

    def key(self, sequence: Sequence) -> Key:
        """Where a request stands: the smallest key is first, of equal ones who came first.

        Asked once for each request, on its caller's thread, and kept until the request ends, so
        that who is preempted keeps its place. An order that changes as time passes is one by a
        time that does not change (see Priority). Numbers without NaN; what else it returns, or
        raises, refuses this request.
        """


class FirstCome:
    """First come, first served."""

    def key(self, sequence: Sequence) -> Key:
        return ()


class ShortestPrompt:
    """Fewest prompt tokens first: the lowest mean time to a first token. While shorter prompts keep
    coming, a long one waits.
    """

    def key(self, sequence: Sequence) -> Key:
        return (len(sequence.admission.prompt_ids),)


class Priority:
    """Highest priority first. Whoever has waited for `ageing_s` seconds stands as high as somebody
    new whose priority is one higher, so that nobody waits for ever.

    All age alike, and so the order of two requests never changes: it is that of the times at which
    they would have come with priority 0.

    Raises ConfigError: `ageing_s` is no finite number above 0.
    """

    def __init__(self, ageing_s: float = 30.0) -> None:
        number = isinstance(ageing_s, Real) and not isinstance(ageing_s, bool)
        if not number or not 0 < ageing_s < math.inf:
            raise ConfigError(f"ageing_s is {shown(ageing_s)}; give a finite number of seconds > 0")
        self.ageing_s = float(ageing_s)

    def key(self, sequence: Sequence) -> Key:
        return (sequence.arrived - sequence.priority * self.ageing_s,)


POLICIES: dict[str, Callable[[], Policy]] = {
    "first-come": FirstCome,
    "shortest-prompt": ShortestPrompt,
    "priority": Priority,
}


def choose_policy(policy: object) -> Policy:
    """The policy of this name, or `policy` itself. Raises ConfigError where it is neither."""
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        names = ", ".join(map(repr, POLICIES))
        raise ConfigError(
            f"policy is {shown(policy)}; give {names}, or an object with a method key(sequence)"
        )
    return policy  # type: ignore[return-value]


def checked_key(policy: Policy, sequence: Sequence) -> Key:
    """The sequence's key. RequestError: the policy raises, or returns what cannot be ordered."""
    name = type(policy).__name__
    try:
        key = policy.key(copy(sequence))  # what it does to it is its own affair
        if isinstance(key, tuple) and all(isinstance(n, Real) for n in key):
            # what the engine thread compares must not be anybody's own code
            plain = tuple(int(n) if isinstance(n, Integral) else float(n) for n in key)
            if all(number == number for number in plain):
                return plain
    except Exception as error:
        raise RequestError(f"key() of the policy {name} raised {describe(error)}") from error
    raise RequestError(
        f"key() of the policy {name} returned {shown(key)}; it must return a tuple of numbers, "
        "of which none is NaN"
    )
