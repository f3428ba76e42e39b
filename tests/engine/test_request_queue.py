"""Mailbox: no call is lost, whatever comes between."""

import itertools
import queue
import sys
import threading
import time

import pytest

from photon_ext.engine import Request, Sequence
from photon_ext.scheduling.mailbox import Mailbox
from tests.scheduling.test_sequence import make


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_in_one_call_loses_none_of_the_next() -> None:
    """A request that was submitted to an idle engine after an interrupted one was not served
    until the call after it.
    """

    def interrupted(number: int) -> bool:
        """Whether a call has so many places to be interrupted at: where Python looks for
        signals, the begins and ends of functions.
        """
        mailbox, taken, left = Mailbox(), queue.SimpleQueue[Sequence](), itertools.count(-number)

        def serve() -> None:
            while not (mail := mailbox.collect(lambda: False)).closing:
                for sequence in mail.submitted:
                    taken.put(sequence)

        def interrupt(frame: object, event: str, argument: object) -> None:
            if event != "c_call" and next(left) == 0:
                sys.setprofile(None)
                time.sleep(0.01)  # the engine thread may wake up before the caller goes on
                raise KeyboardInterrupt

        engine = threading.Thread(target=serve, daemon=True)
        engine.start()
        time.sleep(0.01)  # it sleeps
        first, second = make(), make()
        before = sys.getprofile()
        try:
            sys.setprofile(interrupt)
            mailbox.post([first])
        except KeyboardInterrupt:
            done = False
        else:
            done = True
        finally:
            sys.setprofile(before)
        time.sleep(0.01)  # it sleeps again
        mailbox.post([second])
        while taken.get(timeout=10) is not second:
            pass
        mailbox.close()
        engine.join(10)
        assert not engine.is_alive()
        return not done

    assert next(number for number in itertools.count() if not interrupted(number)) > 5


def test_a_cancel_that_comes_while_the_mail_is_taken_is_in_the_next() -> None:
    """As from a garbage collection on the engine thread, which ends a generator that cancels
    what it reads.
    """
    mailbox = Mailbox()
    early, late = Request(mailbox.cancel), Request(mailbox.cancel)

    class Copied(list[Request]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from list.__iter__(self)
            late.cancel()

    mailbox._cancelled = Copied([early])
    assert mailbox.collect(lambda: False).cancelled == (early,)
    assert mailbox.collect(lambda: True).cancelled == (late,)
