"""What must hold of a pipeline between any two of its calls."""

from __future__ import annotations

from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import RowState
from photon_ext.testing.errors import SimError


def check_invariants(pipeline: Pipeline) -> None:
    """Raises SimError naming the invariant that does not hold (the module
    photon_ext.runtime.pipeline lists them).
    """
    steps = list(pipeline._inflight)
    rows = pipeline.rows
    table = pipeline._runtime.table
    held = {row for step in steps for row in step.rows}
    for row in rows:
        in_use = row.last_step > pipeline._committed
        if in_use != (row in held):
            raise SimError(f"I3: {row} was last in step {row.last_step}; in flight: {in_use}")
        if row.state is RowState.RELEASED or not (row.running or in_use):
            raise SimError(f"I4: {row} is still registered")
        if row.launched >= row.params.max_new_tokens + row.step_tokens or row.prefilled > len(
            row.prompt_ids
        ):
            raise SimError(f"{row}: more was launched than was asked for")
    for row in held:
        if row.state is RowState.RELEASED:
            raise SimError(f"I4: {row} is released, and a step in flight holds it")
    if len(rows) + table.free_rows != table.max_rows:
        raise SimError(f"I9: {len(rows)} rows held and {table.free_rows} free, of {table.max_rows}")
    if len({step.slot for step in steps}) != len(steps) or len(steps) > pipeline._runtime.depth:
        raise SimError(f"I5: steps in flight share slots: {[step.slot for step in steps]}")
    if [step.index for step in steps] != sorted(step.index for step in steps):
        raise SimError(f"I2: steps in flight out of order: {[step.index for step in steps]}")
    if any(not step.finalized for step in steps[:-1]):
        raise SimError("I11: a step waits for its masks, and a later one was launched")
