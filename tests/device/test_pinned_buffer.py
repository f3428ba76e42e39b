"""PinnedBuffer: int32 words that Python writes through the buffer protocol and copies read by
address.
"""

from __future__ import annotations

import ctypes

import pytest

from photon_ext import _C


def test_it_is_a_writable_view_of_zeroed_words(backend):
    buffer = _C.PinnedBuffer(4096, backend)
    view = memoryview(buffer)
    assert (view.format, view.itemsize, view.ndim, view.shape, view.readonly) == (
        "i",
        4,
        1,
        (1024,),
        False,
    )
    assert (buffer.nbytes, buffer.backend, buffer.ptr % 64) == (4096, backend, 0)
    assert not any(view)
    view[3] = -7
    view[1023] = 9
    words = (ctypes.c_int32 * 1024).from_address(buffer.ptr)
    assert (words[3], words[1023]) == (-7, 9)


def test_a_view_keeps_the_memory(backend):
    view = memoryview(_C.PinnedBuffer(64, backend))
    view[0] = 5
    assert view[0] == 5


@pytest.mark.parametrize("nbytes", [0, 2, 63, -4])
def test_sizes_that_are_not_whole_words_are_refused(backend, nbytes):
    with pytest.raises(ValueError, match=f"nbytes is {nbytes}, expected"):
        _C.PinnedBuffer(nbytes, backend)
