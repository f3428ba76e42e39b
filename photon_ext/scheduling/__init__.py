"""Host-side state of requests: sequences, their text, the KV page pool, and who runs next."""

from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.request import Output, Request, StreamEvent
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState
from photon_ext.scheduling.text import StopStrings, TextStream

__all__ = [
    "Output",
    "PagePool",
    "Request",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "StopStrings",
    "StreamEvent",
    "TextStream",
]
