"""Order on one stream, order across streams, what waiting means, and how errors travel (host and
inline backends).
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from photon_ext import _C
from tests.forked import run_script


def zeros(words: int = 1) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32)


def test_work_runs_in_the_order_of_its_calls(stream, kernels):
    cell, expected = zeros(), 0
    for i in range(500):
        kernels.multiply_add(stream, cell, 3, i)
        expected = (expected * 3 + i + 2**31) % 2**32 - 2**31
    stream.synchronize()
    assert cell.item() == expected
    assert stream.query()


def test_copies_are_ordered_with_kernels(stream, kernels):
    source, target = zeros(), zeros()
    for _ in range(3):
        kernels.sleep(stream, 200)
        kernels.multiply_add(stream, source, 2, 1)
        stream.copy(target.data_ptr(), source.data_ptr(), 4)
    stream.synchronize()
    assert (source.item(), target.item()) == (7, 7)


def test_host_work_does_not_block_the_caller(kernels, flag):
    stream = _C.Stream.create("host")
    kernels.wait_for_flag(stream, flag)
    assert not stream.query()
    flag[0] = 1
    stream.synchronize()
    assert stream.query()


def test_a_stream_waits_for_another_ones_event(kernels, flag):
    first, second = _C.Stream.create("host"), _C.Stream.create("host")
    value, seen, event = zeros(), zeros(), _C.Event("host")
    kernels.wait_for_flag(first, flag)
    kernels.multiply_add(first, value, 1, 42)
    first.record(event)
    second.wait(event)
    second.copy(seen.data_ptr(), value.data_ptr(), 4)
    time.sleep(0.01)
    assert not event.query()
    assert not second.query()
    flag[0] = 1
    second.synchronize()
    assert seen.item() == 42
    assert event.query()


def test_a_wait_refers_to_the_record_before_it(kernels, flag):
    """A later record of the same event does not hold back whoever waits for the earlier one."""
    first, second = _C.Stream.create("host"), _C.Stream.create("host")
    event = _C.Event("host")
    first.record(event)
    second.wait(event)
    kernels.wait_for_flag(first, flag)
    first.record(event)
    second.synchronize()
    assert not event.query()
    flag[0] = 1
    event.synchronize()


def test_an_event_that_was_never_recorded_is_complete(backend, stream):
    event = _C.Event(backend)
    assert event.query()
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


@pytest.mark.parametrize("blocking", [True, False])
def test_hazard_23_an_event_can_be_waited_for_sleeping_and_spinning(kernels, blocking):
    stream, value, event = _C.Stream.create("host"), zeros(), _C.Event("host", blocking=blocking)
    kernels.sleep(stream, 2000)
    kernels.multiply_add(stream, value, 1, 5)
    stream.record(event)
    event.synchronize()
    assert value.item() == 5


def test_timing_measures_what_lies_between(backend, stream, kernels):
    begin, end = _C.Event(backend, timing=True), _C.Event(backend, timing=True)
    stream.record(begin)
    kernels.sleep(stream, 20_000)
    stream.record(end)
    end.synchronize()
    assert 20.0 <= end.elapsed_ms(begin) < 2000.0
    assert begin.elapsed_ms(end) == -end.elapsed_ms(begin)


def test_elapsed_needs_two_reached_events_with_timing(kernels, flag):
    stream = _C.Stream.create("host")
    begin, end, plain = (
        _C.Event("host", timing=True),
        _C.Event("host", timing=True),
        _C.Event("host"),
    )
    stream.record(begin)
    begin.synchronize()
    with pytest.raises(RuntimeError, match="never recorded"):
        end.elapsed_ms(begin)
    kernels.wait_for_flag(stream, flag)
    stream.record(end)
    stream.record(plain)
    with pytest.raises(RuntimeError, match="not reached yet"):
        end.elapsed_ms(begin)
    flag[0] = 1
    stream.synchronize()
    with pytest.raises(RuntimeError, match="timing=True"):
        plain.elapsed_ms(begin)
    with pytest.raises(ValueError, match="inline"):
        end.elapsed_ms(_C.Event("inline", timing=True))


def test_an_event_moves_to_another_stream_only_when_it_was_reached(kernels, flag):
    first, second, event = _C.Stream.create("host"), _C.Stream.create("host"), _C.Event("host")
    kernels.wait_for_flag(first, flag)
    first.record(event)
    with pytest.raises(RuntimeError, match="on another stream, still in flight"):
        second.record(event)
    flag[0] = 1
    event.synchronize()
    second.record(event)
    event.synchronize()


@pytest.mark.parametrize("kernel", ["fail_std", "fail_odd"])
def test_a_kernels_error_sticks_to_its_stream(kernels, kernel):
    stream, value, event = _C.Stream.create("host"), zeros(), _C.Event("host")
    words = "the kernel's own words" if kernel == "fail_std" else "not a std::exception"
    kernels.fail(stream, kernel)
    kernels.multiply_add(stream, value, 1, 1)
    stream.record(event)
    for wait in (
        stream.synchronize,
        stream.synchronize,
        event.synchronize,
        event.query,
        stream.query,
    ):
        with pytest.raises(RuntimeError, match=words):
            wait()
    assert value.item() == 0, "what follows an error must not run"


def test_an_error_reaches_the_streams_that_wait_for_it(kernels):
    first, second, bystander = (_C.Stream.create("host") for _ in range(3))
    event = _C.Event("host")
    kernels.fail(first)
    first.record(event)
    second.wait(event)
    with pytest.raises(RuntimeError, match="the kernel's own words"):
        second.synchronize()
    bystander.synchronize()


def test_an_inline_error_is_raised_at_the_call(kernels):
    stream, value = _C.Stream.create("inline"), zeros()
    with pytest.raises(RuntimeError, match="the kernel's own words"):
        kernels.fail(stream)
    kernels.multiply_add(stream, value, 1, 1)
    stream.synchronize()
    assert value.item() == 1


def test_waiting_releases_the_gil(kernels, flag):
    """The worker is let go by a Python thread that can only run while the main thread waits."""
    stream, event = _C.Stream.create("host"), _C.Event("host")
    for wait in (stream.synchronize, event.synchronize):
        flag[0] = 0
        kernels.wait_for_flag(stream, flag)
        stream.record(event)
        helper = threading.Timer(0.02, lambda: flag.fill_(1))
        helper.start()
        wait()
        helper.join()
        assert flag.item() == 1


def test_destroying_a_stream_drains_it(kernels, flag):
    stream, value = _C.Stream.create("host"), zeros()
    kernels.wait_for_flag(stream, flag)
    for _ in range(100):
        kernels.multiply_add(stream, value, 1, 1)
    helper = threading.Timer(0.02, lambda: flag.fill_(1))
    helper.start()
    del stream  # with the GIL held here the helper could never run
    assert value.item() == 100
    helper.join()


def test_the_process_ends_cleanly_with_work_in_flight(kernels):
    """Streams and graphs left behind, even leaked ones, neither hang nor crash the exit, and
    their work is finished.
    """
    program = f"""
import ctypes, struct
from photon_ext import _C
library = ctypes.CDLL({kernels.path!r})
address = lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
asleep, leaked, replaying = (_C.Stream.create("host") for _ in range(3))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
leaked.enqueue(address("sleep_us"), struct.pack("q", 300_000))
leaked.enqueue(address("print_line"), b"")
replaying.begin_capture()
replaying.enqueue(address("sleep_us"), struct.pack("q", 100_000))
graph = replaying.end_capture()
graph.keep_alive([asleep])
replaying.launch(graph)
print("end of the program", flush=True)
"""
    done = run_script(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the program\nworked\n", "")


def test_a_stream_that_is_kept_forever_is_not_destroyed():
    """Told by its thread; nor does it keep the process from its end."""
    program = """
import os, time
from photon_ext import _C

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
stream = _C.Stream.create("host")
del stream
end = time.monotonic() + 60
while threads() > before and time.monotonic() < end:
    time.sleep(0.01)  # the system lists one that has been joined for a moment
print(threads() - before)
stream = _C.Stream.create("host")
stream.keep_forever()
del stream
print(threads() - before)
"""
    done = run_script(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n1\n", "")


def test_misuse_is_explained(stream, backend, kernels):
    other = "inline" if backend == "host" else "host"
    with pytest.raises(ValueError, match="backend is 'gpu', expected 'cuda', 'host' or 'inline'"):
        _C.Stream.create("gpu")
    with pytest.raises(ValueError, match="device is 1"):
        _C.Stream.create(backend, 1)
    with pytest.raises(
        ValueError, match=f"of backend '{backend}', the argument of backend '{other}'"
    ):
        stream.record(_C.Event(other))
    with pytest.raises(
        ValueError, match=f"of backend '{backend}', the argument of backend '{other}'"
    ):
        stream.wait(_C.Event(other))
    with pytest.raises(ValueError, match="dst is a null address"):
        stream.copy(0, zeros().data_ptr(), 4)
    with pytest.raises(ValueError, match="nbytes is -4"):
        stream.copy(zeros().data_ptr(), zeros().data_ptr(), -4)
    with pytest.raises(ValueError, match="params have 513 bytes, at most 512"):
        stream.enqueue(kernels.address("fail_std"), bytes(513))
    with pytest.raises(ValueError, match="null pointer"):
        stream.enqueue(0, b"")
    with pytest.raises(TypeError):
        stream.record(None)
    stream.synchronize()


def test_what_a_stream_says_of_itself(stream, backend):
    assert (stream.backend, stream.device, stream.handle) == (backend, 0, 0)
    assert _C.Event(backend).backend == backend
    stream.copy(0, 0, 0)  # nothing to copy: no address is looked at


@pytest.mark.skipif(_C.cuda_device_count() > 0, reason="there is a CUDA device")
def test_without_a_device_cuda_says_what_to_do():
    assert _C.cuda_device_count() == 0
    for create in (
        lambda: _C.Stream.create("cuda"),
        lambda: _C.Event("cuda"),
        lambda: _C.PinnedBuffer(64, "cuda"),
    ):
        with pytest.raises(RuntimeError, match=r"use backend 'host'|update the driver"):
            create()


FORK = """
import os, sys
from photon_ext import _C
stream = _C.Stream.create("host")
child = os.fork()
if child == 0:
    try:
        stream.synchronize()
    except RuntimeError as error:
        print(error, flush=True)
    fresh = _C.Stream.create("host")
    fresh.synchronize()
    del stream
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stream.synchronize()
print("parent goes on")
"""


def test_a_forked_child_is_told_and_ends_and_the_parent_goes_on() -> None:
    done = run_script(FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "this host stream belongs to the process that was forked; use a fresh process instead "
        "(multiprocessing's 'spawn'), "
        "or call torch.set_num_threads(1) here and then make a new Runtime, or Engine",
        "parent goes on",
    ]
