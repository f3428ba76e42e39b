"""What the simulated device holds: tables, pages, and the memory of its slots, as plain lists
with poison in them.
"""

from __future__ import annotations

from photon_ext.layout import COUNTS_SIZE, RECORD_WIDTH, ROW_COLUMNS, InputLayout, MaskLayout
from photon_ext.testing.errors import SimPoison

POISON = -559038737
"""Word that released, consumed and unwritten memory holds: 0xDEADBEEF."""


def clean(word: int, what: str) -> int:
    """``word``, unless it is poison."""
    if word == POISON:
        raise SimPoison(f"{what} was read, and it was released, consumed or never written")
    return word


class SlotState:
    """Device memory that one slot owns."""

    __slots__ = ("input", "mask", "records")

    def __init__(self, inputs: InputLayout, masks: MaskLayout) -> None:
        self.input = [0] * inputs.words
        self.mask = [0] * masks.words(inputs.max_segments)
        self.records = [POISON] * (inputs.max_segments * RECORD_WIDTH)


class DeviceState:
    """Persistent tables and the memory that all steps share.

    Attributes:
        row_state, page_table, stop_ids: one list per row; rows without a lease are poison.
        pages: tokens by page and offset; a page without a lease has no entry.
        decode_meta: (token, position, length, row) per token.
        counts: of decode tokens, tokens and segments, see layout.Count.
        logits: of the latest forward, one list per segment, empty where nothing is sampled.
        logits_of: number of the launch that wrote ``logits``.
        sampled, row_errors: one per segment.
    """

    def __init__(self, rows: int, pages_per_row: int, max_stop_ids: int, page_size: int) -> None:
        self.page_size = page_size
        self.row_state = [[0] * ROW_COLUMNS, *([POISON] * ROW_COLUMNS for _ in range(1, rows))]
        self.page_table = [[POISON] * pages_per_row for _ in range(rows)]
        self.stop_ids = [[POISON] * max_stop_ids for _ in range(rows)]
        self.pages: dict[int, list[int]] = {}
        self.decode_meta: list[tuple[int, int, int, int]] = []
        self.counts = [0] * COUNTS_SIZE
        self.logits: list[list[float]] = []
        self.logits_of = -1
        self.sampled: list[int] = []
        self.row_errors: list[int] = []

    def page_of(self, row: int, position: int) -> int:
        """The page that holds ``position`` of ``row``."""
        entries = self.page_table[row]
        index = position // self.page_size
        if index >= len(entries):
            raise SimPoison(f"row {row} reaches position {position}, past its {len(entries)} pages")
        page = clean(entries[index], f"page_table[{row}][{index}]")
        if page < 0:
            raise SimPoison(f"row {row} has no page for position {position}: its entry is {page}")
        return page

    def store(self, row: int, position: int, token: int) -> int:
        """Writes one KV entry; returns its page."""
        page = self.page_of(row, position)
        self.pages.setdefault(page, [POISON] * self.page_size)[position % self.page_size] = token
        return page

    def context(self, row: int, length: int) -> list[int]:
        """The first ``length`` KV entries of ``row``, read through its pages."""
        tokens: list[int] = []
        for start in range(0, length, self.page_size):
            page = self.page_of(row, start)
            tokens += self.pages.get(page, [POISON] * self.page_size)[: length - start]
        if POISON in tokens:
            at = tokens.index(POISON)
            raise SimPoison(
                f"KV of row {row} at position {at}, page {self.page_of(row, at)}, was released or "
                "never written"
            )
        return tokens

    def poison_row(self, row: int) -> None:
        """The row's lease is over."""
        for table in (self.row_state, self.page_table, self.stop_ids):
            table[row][:] = [POISON] * len(table[row])

    def poison_page(self, page: int) -> None:
        """The page's lease is over."""
        self.pages.pop(page, None)
