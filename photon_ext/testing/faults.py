"""Bugs to plant below the pipeline, to see that tests find them."""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """One planted bug of the device layer. The last three are correct but slow."""

    DROP_INPUT_WAIT = "the graph does not wait for the copy of its input"
    DROP_MASK_WAIT = "late sampling does not wait for the copy of its masks"
    DROP_OUTPUT_WAIT = "the out-copy does not wait for the step's outputs"
    COMMIT_WITHOUT_WAIT = "the host reads the records before they were copied out"
    STALE_DELTAS = "begin_step leaves the deltas in place, and a quiet step applies them again"
    STAGED_REUSED = (
        "begin_step leaves staged tokens in place, and a slot whose segments did not "
        "change does not send new ones"
    )
    DELTAS_OFF_STREAM = (
        "row deltas are applied by the in-copy stream, beside the step that reads the rows"
    )
    AUTOMATON_OFF_STREAM = "an automaton is copied on a stream that no step waits for"
    STATE_KEPT = "publish_ leaves the states of automata as they are"

    LATE_OUT_COPY = "the out-copy is enqueued at the wait, behind the next forward"
    EXTRA_WAIT = "launch waits for its input copy"
    RESEND = "a quiet step sends its segments again"
