"""Decides: who gets a row and pages, who rides in the next step, and where tokens belong."""

from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.planner import Planner
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState
from photon_ext.scheduling.token_budget import TokenBudget

__all__ = ["PagePool", "Planner", "Scheduler", "Sequence", "SequenceState", "TokenBudget"]
