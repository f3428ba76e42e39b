"""Decides: who gets a row and pages, who rides in the next step, and where tokens belong."""

from photon_ext.scheduling.pager import Pager
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.planner import Planner
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState

__all__ = ["PagePool", "Pager", "Planner", "Scheduler", "Sequence", "SequenceState"]
