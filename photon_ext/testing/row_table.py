"""The row table of the simulated device: it sees what leases take and give back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from photon_ext.layout import RowColumn
from photon_ext.runtime.row_table import RowTable
from photon_ext.testing.device import SimDevice
from photon_ext.testing.errors import SimLeaseError
from photon_ext.testing.state import DeviceState


class SimRowTable(RowTable):
    """Poisons rows and pages when their lease ends, and reports what is given out or back twice.

    The end counts as a write by the host to the row's lease or the page: a step in flight that uses
    it races with that. Rows may share the pages that hold what they found cached.

    Attributes:
        state: the device's side: the tables and the pages.
    """

    def __init__(
        self,
        device: SimDevice,
        max_rows: int,
        pages_per_row: int,
        max_stop_ids: int,
        page_size: int,
        keeps_pages: bool,
        max_biases: int,
        penalty_vocab: int,
    ) -> None:
        """``keeps_pages``: a page's lease ends when it is given to hold something else, as above
        the pipeline somebody keeps what released rows have written; else with its last row.
        """
        super().__init__(max_rows, pages_per_row, max_stop_ids, max_biases, penalty_vocab)
        self.state = DeviceState(self, page_size)
        self._device = device
        self._keeps_pages = keeps_pages
        self._pages: dict[int, tuple[int, ...]] = {}

    @property
    def held_pages(self) -> dict[int, tuple[int, ...]]:
        """Pages by row, of rows not yet released."""
        return dict(self._pages)

    def write_row(
        self, row: int, state: Sequence[int], pages: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """See RowTable.write_row."""
        if row in self._pages:
            raise SimLeaseError(
                f"row {row} is given to a second lease before the first is released"
            )
        self._pages[row] = ()
        cached = state[RowColumn.POSITION] // self.state.page_size
        self._give(row, pages, pages[cached:])
        super().write_row(row, state, pages, stop_ids)

    def append_pages(self, row: int, held: int, pages: Sequence[int]) -> None:
        """See RowTable.append_pages."""
        if len(self._pages.get(row, ())) != held:
            raise SimLeaseError(f"row {row} gets pages behind {held}, and holds another number")
        self._give(row, pages, pages)
        super().append_pages(row, held, pages)

    def _give(self, row: int, pages: Sequence[int], fresh: Sequence[int]) -> None:
        mine = self._pages[row] + tuple(pages)
        if len(set(mine)) != len(mine) or min(mine, default=0) < 0:
            raise SimLeaseError(
                f"row {row} is given pages {mine}; they must differ, and none is below 0"
            )
        for other, held in self._pages.items():
            if shared := set(fresh).intersection(held):
                raise SimLeaseError(
                    f"row {row} is given pages {sorted(shared)}, which row {other} still holds"
                )
        self._pages[row] = mine
        if self._keeps_pages:
            self._end_leases(fresh, f"the lease of row {row}")

    def release(self, row: int) -> None:
        """See RowTable.release."""
        if row not in self._pages:
            raise SimLeaseError(f"row {row} is released, and no lease holds it")
        self._device.trace.append(f"host releases row {row}")
        self._device.host_write(f"the release of row {row}", "lease", row)
        pages = self._pages.pop(row)
        if not self._keeps_pages:
            shared = {page for held in self._pages.values() for page in held}
            alone = [page for page in pages if page not in shared]
            self._end_leases(alone, f"the release of row {row}")
        self.state.poison_row(row)
        super().release(row)

    def _end_leases(self, pages: Iterable[int], what: str) -> None:
        for page in pages:
            self._device.host_write(what, "page", page)
            self.state.poison_page(page)
