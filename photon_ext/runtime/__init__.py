"""The decode runtime: rows, leases, slots, captured steps and the pipeline that orders them.

Needs torch only.
"""

from photon_ext.runtime.lease import Lease, LeaseState
from photon_ext.runtime.pipeline import Pipeline, PipelineStats
from photon_ext.runtime.row import Row
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.runtime import Runtime
from photon_ext.runtime.step import FinishReason, RowEvent, Step, StepKey, StepKind, StepTensors

__all__ = [
    "FinishReason",
    "Lease",
    "LeaseState",
    "Pipeline",
    "PipelineStats",
    "Row",
    "RowEvent",
    "RowTable",
    "Runtime",
    "Step",
    "StepKey",
    "StepKind",
    "StepTensors",
]
