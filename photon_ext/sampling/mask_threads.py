"""The masks of a step's grammars, filled together by native threads."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from photon_ext.sampling.grammar_constraint import GrammarConstraint

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from photon_ext.sampling.constraints import Constraint

# To wake the threads takes 0.03 to 0.1 ms, a mask 1 to 10 us, some 0.2 ms and more.
LEAST_TOGETHER = 8


class MaskThreads:
    """Native threads, started with the first step that needs them: four of five cores, 32 at the
    most. Used by the engine thread alone, which gives up the interpreter to others once meanwhile,
    and not for each mask.

    Attributes:
        enabled: False where the step's kernels take all cores: each row fills its own mask then.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._executor: LLExecutor | None = None
        self._words = array("i")

    def fill(self, constraints: Iterable[Constraint | None]) -> None:
        """Fills the next masks of those that are grammars of one vocabulary; each hands its mask
        out when it is asked for it. A few fill their own then.
        """
        if not self.enabled:
            return
        grammars = [one for one in constraints if isinstance(one, GrammarConstraint)]
        if len(grammars) < LEAST_TOGETHER:
            return
        size = grammars[0].mask_bytes
        width = size // self._words.itemsize
        if len(self._words) < width * len(grammars):
            self._words = array("i", bytes(size * len(grammars)))
        address, _ = self._words.buffer_info()
        pairs = [(one.matcher, place) for place, one in enumerate(grammars)]
        try:
            self._threads().unsafe_compute_mask_ptr(pairs, address, size, len(pairs))
        except BaseException:  # the library's panics; whose fault it was, its own mask tells
            return
        masks = memoryview(self._words)
        for place, one in enumerate(grammars):
            one.filled = masks[place * width : (place + 1) * width]

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor
