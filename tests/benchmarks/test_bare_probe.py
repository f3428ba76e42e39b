"""What the checks for a timeline are measured against."""

from unittest.mock import Mock, patch

import pytest

from benchmarks.common.bare_probe import CALLS, bare_probe
from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase, Probe


def test_within_it_nothing_reaches_an_observer() -> None:
    observer = Mock()
    with patch.object(probe, "active", observer):
        probe.begin(Phase.PLAN)
        with bare_probe():
            probe.begin(Phase.WAIT, 3)
            probe.end()
            probe.turn(None)
        probe.end()
    assert [call[0] for call in observer.method_calls] == ["begin", "end"]


def test_the_probe_is_back_after_an_error() -> None:
    before = [getattr(probe, name) for name in CALLS]
    with pytest.raises(RuntimeError), bare_probe():
        raise RuntimeError
    assert [getattr(probe, name) for name in CALLS] == before


def test_it_knows_every_call_of_a_probe() -> None:
    assert set(CALLS) == {name for name in vars(Probe) if not name.startswith("_")}
