"""What must hold of a pipeline between any two of its calls."""

from __future__ import annotations

from collections import Counter

from photon_ext.runtime.lease import LeaseState
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.testing.errors import SimError


def check_invariants(pipeline: Pipeline) -> None:
    """Raises SimError naming the invariant that does not hold (the module
    photon_ext.runtime.pipeline lists them).
    """
    steps = list(pipeline._inflight)
    rows = pipeline.rows
    table = pipeline._runtime.table
    refs = Counter(segment.row.lease for step in steps for segment in step.segments)
    for row in rows:
        if row.lease.inflight_refs != refs[row.lease]:
            raise SimError(
                f"I3: {row} counts {row.lease.inflight_refs} steps in flight, there are "
                f"{refs[row.lease]}"
            )
        if row.lease.state is LeaseState.RELEASED or row.lease.releasable:
            raise SimError(f"I4: {row} is still registered")
        if (
            row.committed > row.sampled
            or row.sampled > row.max_new_tokens
            or row.prefilled > len(row.prompt_ids)
        ):
            raise SimError(
                f"{row}: {row.committed} committed, {row.sampled} of {row.max_new_tokens} launched"
            )
    for lease in refs:
        if lease.state is LeaseState.RELEASED:
            raise SimError(f"I4: {lease} is released, and a step in flight holds it")
    if len(rows) + table.free_rows != table.max_rows:
        raise SimError(f"I9: {len(rows)} rows held and {table.free_rows} free, of {table.max_rows}")
    if len({step.slot for step in steps}) != len(steps) or len(steps) > pipeline._runtime.depth:
        raise SimError(f"I5: steps in flight share slots: {[step.slot for step in steps]}")
    if [step.index for step in steps] != sorted(step.index for step in steps):
        raise SimError(f"I2: steps in flight out of order: {[step.index for step in steps]}")
    if any(not step.finalized for step in steps[:-1]):
        raise SimError("I11: a step waits for its masks, and a later one was launched")
