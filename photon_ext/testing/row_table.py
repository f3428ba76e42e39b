"""The row table of the simulated device: it sees what leases take and give back."""

from __future__ import annotations

from collections.abc import Sequence

from photon_ext.runtime.row_table import RowTable
from photon_ext.testing.device import SimDevice
from photon_ext.testing.errors import SimLeaseError
from photon_ext.testing.state import DeviceState


class SimRowTable(RowTable):
    """Poisons rows and pages at release, and reports what is given out or back twice.

    A release counts as a write by the host to the row's lease and pages: a step in flight that uses
    them races with it.

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
    ) -> None:
        super().__init__(max_rows, pages_per_row, max_stop_ids)
        self.state = DeviceState(self.rows, pages_per_row, max_stop_ids, page_size)
        self._device = device
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
        if len(set(pages)) != len(pages) or min(pages, default=0) < 0:
            raise SimLeaseError(
                f"row {row} is given pages {tuple(pages)}; they must differ, and none is below 0"
            )
        for other, held in self._pages.items():
            if shared := set(pages).intersection(held):
                raise SimLeaseError(
                    f"row {row} is given pages {sorted(shared)}, which row {other} still holds"
                )
        self._pages[row] = tuple(pages)
        super().write_row(row, state, pages, stop_ids)

    def release(self, row: int) -> None:
        """See RowTable.release."""
        if row not in self._pages:
            raise SimLeaseError(f"row {row} is released, and no lease holds it")
        self._device.trace.append(f"host releases row {row}")
        self._device.host_write(f"the release of row {row}", "lease", row)
        for page in self._pages.pop(row):
            self._device.host_write(f"the release of row {row}", "page", page)
            self.state.poison_page(page)
        self.state.poison_row(row)
        super().release(row)
