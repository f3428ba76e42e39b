"""What the simulated device holds, as CPU tensors: the tables, the memory of steps and slots, and
the KV pages that forwards have asked to be watched.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import torch

from photon_ext.errors import ConfigError
from photon_ext.layout import (
    NO_PAGE,
    ROW_COLUMNS,
    AutomatonWord,
    InputLayout,
    MaskLayout,
    RowColumn,
)
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step_program import SharedMemory, SlotMemory, Tables
from photon_ext.testing.errors import SimPoison
from photon_ext.testing.memory import Access, Range
from photon_ext.testing.poison import POISON, clean, poison, words_of

CPU = torch.device("cpu")
BLOCK = 64  # words of automata that count as one range of memory


class SlotState:
    """Device memory that one slot owns.

    Attributes:
        memory: its tensors, which the step's ops read and write.
        input, mask, records: the same memory as int32 words.
    """

    def __init__(self, index: int, inputs: InputLayout, masks: MaskLayout) -> None:
        self.memory = SlotMemory.zeros(inputs, masks, CPU)
        poison(self.memory.output)
        self.input = words_of(self.memory.input)
        self.mask = words_of(self.memory.mask)
        self.records = words_of(self.memory.output)
        self.names: dict[int, Range] = {
            _storage(self.memory.input): ("input", index),
            _storage(self.memory.mask): ("mask", index),
            _storage(self.memory.output): ("records", index),
        }


class DeviceState:
    """Persistent tables and the memory that all steps share. What has no lease is poison.

    Attributes:
        tables: those of layout.DeltaTable, int32.
        shared: decode_meta, counts, sampled and row_errors; None before a Pipeline is made.
        names: the range of each tensor's memory, by the address of its storage.
        pages: the watched pages that were written since their last release.
        logits_of: number of the launch that wrote the latest logits.
        gives: see SimRuntime.
    """

    def __init__(self, table: RowTable, page_size: int) -> None:
        self.page_size = page_size
        self.rows = table.rows
        self.pages_per_row = table.pages_per_row
        widths = table.widths
        self.tables = Tables(
            *(torch.full((self.rows, width), POISON, dtype=torch.int32) for width in widths)
        )
        self.tables.row_state[0] = 0
        self.shared: SharedMemory | None = None
        self.gives: Callable[[int, int], int] | None = None
        self.pages: set[int] = set()
        self.logits_of = -1
        self.names: dict[int, Range] = {
            _storage(tensor): (name,) for name, tensor in self.tables._asdict().items()
        }
        self._words = [words_of(tensor) for tensor in self.tables]
        self._fill = [array("i", [POISON] * width) for width in widths]
        self._row_state, self._page_table = self._words[:2]
        self._watched: list[torch.Tensor] = []
        self._watched_storages: set[int] = set()

    def open(self, num_tokens: int, segments: int, automaton_words: int = 0) -> None:
        """Makes the memory that all steps share, for steps of at most so many."""
        self.shared = SharedMemory.zeros(num_tokens, segments, CPU, automaton_words)
        self._meta = words_of(self.shared.decode_meta)
        poison(self.shared.automata)
        for name, tensor in self.shared._asdict().items():
            if tensor is not self.shared.automata:  # it counts by the block
                self.names[_storage(tensor)] = (name,)

    # --- automata ---------------------------------------------------------------------------------

    def write_automaton(self, offset: int, words: torch.Tensor, access: Access) -> None:
        """Words of an automaton arrive."""
        assert self.shared is not None
        self.shared.automata[offset : offset + len(words)] = words
        for block in _blocks(offset, len(words)):
            access.write("automata", block)

    def read_automaton(self, row: int, access: Access) -> None:
        """A step reads the automaton of a row, if it has one. Raises SimPoison: it names none."""
        offset = self._row_state[row * ROW_COLUMNS + RowColumn.AUTOMATON]
        if offset == 0:
            return
        assert self.shared is not None
        size = int(self.shared.automata[offset + AutomatonWord.SIZE])
        clean(size, f"the automaton of row {row}")
        for block in (*_blocks(0, 1), *_blocks(offset, size)):
            access.read("automata", block)

    def put_back_state(self, row: int, state: int) -> None:
        """The state of a row's automaton is as it was, for a fault."""
        self._row_state[row * ROW_COLUMNS + RowColumn.AUTOMATON_STATE] = state

    def automaton_state(self, row: int) -> int:
        """The state of a row's automaton."""
        return self._row_state[row * ROW_COLUMNS + RowColumn.AUTOMATON_STATE]

    # --- rows -------------------------------------------------------------------------------------

    def alive(self, row: int) -> bool:
        """Whether ``row`` takes part in steps. Raises SimPoison where no lease holds it."""
        clean(self._row_state[row * ROW_COLUMNS + RowColumn.GENERATION], f"row {row}")
        return self._row_state[row * ROW_COLUMNS + RowColumn.ALIVE] != 0

    def lay_aside(self, launch: int, rows: Iterable[int], tokens: int) -> list[int]:
        """Of these rows those that a launch gives no more than ``tokens`` tokens take no part in
        what follows, until `take_back`.
        """
        if self.gives is None:
            return []
        aside = [row for row in rows if self.alive(row) and self.gives(launch, row) <= tokens]
        self._set_alive(aside, 0)
        return aside

    def take_back(self, rows: Iterable[int]) -> None:
        """They take part again."""
        self._set_alive(rows, 1)

    def _set_alive(self, rows: Iterable[int], alive: int) -> None:
        for row in rows:
            self._row_state[row * ROW_COLUMNS + RowColumn.ALIVE] = alive

    def slot_of(self, row: int) -> int:
        """Which adapter slot a row has; 0: none."""
        return self._row_state[row * ROW_COLUMNS + RowColumn.LORA_SLOT]

    def poison_row(self, row: int) -> None:
        """The row's lease is over."""
        for words, fill in zip(self._words, self._fill, strict=True):
            words[row * len(fill) : (row + 1) * len(fill)] = fill

    # --- pages ------------------------------------------------------------------------------------

    def watch_pages(self, memory: torch.Tensor) -> None:
        """Watches ``memory``, whose first dimension counts KV pages; it becomes poison."""
        if memory.device != CPU or memory.dim() == 0:
            raise ConfigError(
                f"the memory to watch is on {memory.device} with shape {tuple(memory.shape)}; the "
                "simulated device watches CPU tensors whose first dimension counts pages"
            )
        poison(memory)
        self._watched.append(memory)
        self._watched_storages.add(_storage(memory))

    def watches(self, storage: int) -> bool:
        """Whether the storage at this address holds watched pages."""
        return storage in self._watched_storages

    def poison_page(self, page: int) -> None:
        """The page's lease is over."""
        self.pages.discard(page)
        for memory in self._watched:
            if page < memory.shape[0]:
                poison(memory[page])

    def pages_of_step(self, num_tokens: int) -> tuple[set[int], set[int]]:
        """Pages that the live tokens of the step in decode_meta are written to, and all pages of
        their contexts. Raises SimPoison where a position has no page.
        """
        written: set[int] = set()
        contexts: dict[int, int] = {}
        meta = self._meta[: 4 * num_tokens].tolist()
        for at in range(0, len(meta), 4):
            _, position, length, row = meta[at : at + 4]
            if length:
                written.add(self.page_of(row, position))
                contexts[row] = max(contexts.get(row, 0), length)
        read = {
            self.page_of(row, start)
            for row, length in contexts.items()
            for start in range(0, length, self.page_size)
        }
        return written, read

    def page_of(self, row: int, position: int) -> int:
        """The page that holds ``position`` of ``row``."""
        index = position // self.page_size
        if index >= self.pages_per_row:
            raise SimPoison(
                f"row {row} reaches position {position}, past its {self.pages_per_row} pages"
            )
        page = self._page_table[row * self.pages_per_row + index]
        clean(page, f"page_table[{row}][{index}]")
        if page == NO_PAGE:
            raise SimPoison(f"row {row} has no page at position {position}")
        return page


def _blocks(offset: int, words: int) -> range:
    """The blocks of BLOCK words that these are in."""
    return range(offset // BLOCK, -(-(offset + words) // BLOCK))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
