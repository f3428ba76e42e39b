"""The lease's life: running, finalized, released once, never while steps in flight use it (I3,
I4).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from photon_ext.runtime.lease import Lease, RowState

from photon_ext.errors import PipelineError


@pytest.fixture
def lease() -> Lease:
    return Lease(3, 7, (3,))


def test_a_lease_lives_once(lease: Lease) -> None:
    lease.retain()
    lease.finalize()
    assert lease.zombie
    assert not lease.releasable
    lease.drop()
    assert lease.releasable
    lease.release()
    assert lease.state is RowState.RELEASED


def test_i4_running_lease_is_not_released(lease: Lease) -> None:
    with pytest.raises(PipelineError, match="released while running with 0 steps"):
        lease.release()


def test_i4_zombie_is_not_released(lease: Lease) -> None:
    lease.retain()
    lease.finalize()
    with pytest.raises(PipelineError, match="finalized with 1 steps in flight"):
        lease.release()


def test_i4_lease_is_released_once(lease: Lease) -> None:
    lease.finalize()
    lease.release()
    for again in (lease.release, lease.finalize, lease.retain):
        with pytest.raises(PipelineError, match="release"):
            again()


def test_hazard_7_counts_cannot_underflow(lease: Lease) -> None:
    with pytest.raises(PipelineError, match="dropped more often"):
        lease.drop()


def test_a_finalized_lease_is_not_launched(lease: Lease) -> None:
    lease.finalize()
    lease.finalize()  # idempotent
    with pytest.raises(PipelineError, match="finalized lease cannot be launched"):
        lease.retain()


@given(st.lists(st.sampled_from(["retain", "drop", "finalize", "release"])))
def test_no_sequence_of_calls_releases_early_or_twice(calls: list[str]) -> None:
    lease = Lease(1, 1, (1,))
    refs = released = 0
    for call in calls:
        try:
            getattr(lease, call)()
        except PipelineError:
            continue
        refs += (call == "retain") - (call == "drop")
        released += call == "release"
        assert refs == lease.inflight_refs >= 0
        assert call != "release" or refs == 0
    assert released <= 1
