"""Decides: who gets a row and pages, who is scheduled in the next step, and where tokens belong."""

from photon_ext.scheduling.deadlines import Deadlines
from photon_ext.scheduling.delayed_launch import DelayedLaunch
from photon_ext.scheduling.pager import Pager
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.planner import Planner
from photon_ext.scheduling.policy import FirstCome, Policy, Priority, ShortestPrompt
from photon_ext.scheduling.range_pool import RangePool
from photon_ext.scheduling.registry import Registry
from photon_ext.scheduling.scheduler import RequestStats, Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState
from photon_ext.scheduling.step_times import StepTime, StepTimes
from photon_ext.scheduling.token_budget import TokenBudget

__all__ = [
    "Deadlines",
    "DelayedLaunch",
    "FirstCome",
    "PagePool",
    "Pager",
    "Planner",
    "Policy",
    "Priority",
    "RangePool",
    "Registry",
    "RequestStats",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "ShortestPrompt",
    "StepTime",
    "StepTimes",
    "TokenBudget",
]
