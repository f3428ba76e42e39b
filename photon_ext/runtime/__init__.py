"""The decode runtime: rows, slots, captured steps and the pipeline that orders them; torch only."""

from photon_ext.row_params import RowParams
from photon_ext.runtime.admission import Admission
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import Row, RowState
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.runtime import Runtime
from photon_ext.runtime.stats import PipelineStats
from photon_ext.runtime.step import (
    Chunk,
    FinishReason,
    PageAppend,
    RowEvent,
    Step,
    StepKey,
    StepKind,
    StepPlan,
    StepResult,
    StepTensors,
    TokenLogprobs,
)
from photon_ext.runtime.step_features import StepFeatures

__all__ = [
    "Admission",
    "Chunk",
    "FinishReason",
    "PageAppend",
    "Pipeline",
    "PipelineStats",
    "Row",
    "RowEvent",
    "RowParams",
    "RowState",
    "RowTable",
    "Runtime",
    "Step",
    "StepFeatures",
    "StepKey",
    "StepKind",
    "StepPlan",
    "StepResult",
    "StepTensors",
    "TokenLogprobs",
]
