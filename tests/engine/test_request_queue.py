"""RequestQueue: no call is lost, whatever comes between."""

import itertools
import queue
import sys
import threading
import time

import pytest

from photon_ext.engine import Request
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.errors import EngineDeadError, RequestError
from photon_ext.runtime import Admission, RowParams
from photon_ext.sampling import Constraint, from_allowed_ids
from photon_ext.sampling.bad_words import Endings, WithoutSequences
from photon_ext.scheduling import Registry, Sequence

IDS = RequestQueue()  # requests of all queues here have different ids


def make(constraint: Constraint | None = None) -> Sequence[Request]:
    return Sequence(Admission((1, 2), RowParams()), constraint, Request(IDS))


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_in_one_call_loses_none_of_the_next() -> None:
    """A request that was submitted to an idle engine after an interrupted one was not served
    until the call after it.
    """

    def interrupted(number: int) -> bool:
        """Whether a call has so many places to be interrupted at: where Python looks for
        signals, the begins and ends of functions.
        """
        requests, left = RequestQueue(), itertools.count(-number)
        taken = queue.SimpleQueue[Sequence]()

        def serve() -> None:
            while not (arrivals := requests.collect(lambda: None)).closing:
                for sequence in arrivals.submitted:
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
            requests.post([first])
        except KeyboardInterrupt:
            done = False
        else:
            done = True
        finally:
            sys.setprofile(before)
        time.sleep(0.01)  # it sleeps again
        requests.post([second])
        while taken.get(timeout=60) is not second:
            pass
        requests.close()
        engine.join(60)
        assert not engine.is_alive()
        return not done

    assert next(number for number in itertools.count() if not interrupted(number)) > 5


def test_a_cancel_that_comes_while_arrivals_are_taken_is_not_lost() -> None:
    """As from a garbage collection on the engine thread, which ends a generator that cancels
    what it reads.
    """
    requests = RequestQueue()
    early, late = Request(requests), Request(requests)

    class Arrived(queue.SimpleQueue[Request]):
        def get(self, *args: object) -> Request:
            taken = super().get()
            if taken is early:
                late.cancel()
            return taken

    requests._arrived = Arrived()
    early.cancel()
    first, second = requests.collect(lambda: None), requests.collect(lambda: 0.0)
    assert [*first.cancelled, *second.cancelled] == [early, late]


def test_a_rest_ends_after_its_time_or_with_what_arrives() -> None:
    requests = RequestQueue()
    begin = time.monotonic()
    rests = iter([0.03, 0.02, 0.0])
    assert requests.collect(lambda: next(rests)).submitted == []
    assert time.monotonic() - begin >= 0.05
    sequence = make()
    timer = threading.Timer(0.05, requests.post, [[sequence]])
    timer.start()
    assert requests.collect(lambda: 60.0).submitted == [sequence]
    timer.join(60)
    requests.close()
    asked: list[float] = []
    assert requests.collect(lambda: asked.append(60.0) or 60.0).closing
    assert asked == [], "nobody rests at the end"


def test_whoever_submits_gives_way_once_the_request_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine thread, which may wait for the interpreter, finds it and takes it at once."""
    requests, sequence = RequestQueue(), make()
    rests: list[tuple[float, list[Sequence]]] = []

    def rest(seconds: float) -> None:
        rests.append((seconds, requests.collect(lambda: 0.0).submitted))

    monkeypatch.setattr(time, "sleep", rest)
    requests.post([sequence])
    assert rests == [(0, [sequence])]


def test_a_constraint_object_is_lent_to_one_request_and_free_when_it_is_given_back() -> None:
    registry, constraint = Registry[Request](), from_allowed_ids([1])
    requests = RequestQueue(registry)
    with pytest.raises(RequestError, match="this AllowedIds already serves another request"):
        requests.post([make(constraint), make(constraint)])
    assert requests.collect(lambda: 0.0).submitted == [], "nothing was queued"
    first = make(constraint)
    requests.post([first])
    assert requests.collect(lambda: None).submitted == [first]
    with pytest.raises(RequestError, match="already serves"):
        requests.post([make(constraint)])
    registry.remove(first)
    requests.post([make(constraint)])


def test_requests_are_registered_until_they_end_also_those_that_nobody_collects() -> None:
    registry = Registry[Request]()
    requests = RequestQueue(registry)
    requests.post([taken := make()])
    assert requests.collect(lambda: None).submitted == [taken]
    requests.post([left := make()])
    requests.fail(OSError("no power"))
    assert registry.live == (taken, left)
    with pytest.raises(EngineDeadError, match=r"the engine has crashed \(OSError: no power"):
        requests.post([make()])


class Empty:
    """A constraint of the caller's that counts as false."""

    def __len__(self) -> int:
        return 0

    def advance(self, token: int) -> None: ...

    def fill_bitmask(self, words: memoryview) -> None: ...


@pytest.mark.parametrize("constraint", [from_allowed_ids([1, 2]), Empty()], ids=["ids", "empty"])
def test_a_constraint_beside_bad_words_serves_one_request_at_a_time(constraint: Constraint) -> None:
    registry = Registry[Request]()
    requests = RequestQueue(registry)

    def beside() -> Sequence:
        return make(WithoutSequences(Endings([(1, 2)]), constraint))

    first = beside()
    requests.post([first])
    for other in (beside(), make(constraint)):
        with pytest.raises(RequestError, match="already serves another request"):
            requests.post([other])
    registry.remove(first)
    requests.post([beside(), make(WithoutSequences(Endings([(1, 2)]), None))])
