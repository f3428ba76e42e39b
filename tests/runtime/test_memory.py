"""Two slots share everything but staging, records and masks."""

from __future__ import annotations

import pytest
import torch

from photon_ext.layout import InputLayout, MaskLayout
from photon_ext.models.layers.buffers import allocate_activations
from photon_ext.models.shapes import NAMED_SHAPES
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step_program import SlotMemory

ROWS, CHUNK, MAX_LEN, PAGE = 32, 256, 4096, 16
META = torch.device("meta")


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_two_slots_cost_at_most_five_percent_more_than_one(name: str) -> None:
    """The engine's defaults at 32 rows; byte counts of the very allocations, on the meta device."""
    config = NAMED_SHAPES[name]
    arena = allocate_activations(config, CHUNK, ROWS, torch.bfloat16, META).memory.nbytes
    table = RowTable(ROWS, MAX_LEN // PAGE, max_stop_ids=16)
    slot = SlotMemory.zeros(
        InputLayout(ROWS, CHUNK, table.delta_capacity), MaskLayout(ROWS, config.vocab), META
    )
    owned = sum(tensor.nbytes for tensor in slot)
    assert (arena + 2 * owned) / (arena + owned) <= 1.05
