"""MP3 by the system's libmpg123, where there is one (Debian: libmpg123-0). libsndfile decodes by the same, but has Python fetch
each frame's header and content, which takes a seventh of the time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FLOAT32 = 0x200
_ADD_FLAGS, _FLAGS = 2, 0x20 | 0x40 | 0x400  # quiet; without the encoder's padding; float32


@functools.cache
def _library() -> Any:
    """None where there is none that can be used."""
    try:
        library = ctypes.CDLL("libmpg123.so.0")
    except OSError:
        return None
    handle, size = ctypes.c_void_p, ctypes.c_size_t
    library.mpg123_new.restype = handle
    for name, *types in (
        ("new", ctypes.c_char_p, handle),
        ("delete", handle),
        ("param", handle, ctypes.c_int, ctypes.c_long, ctypes.c_double),
        ("open_feed", handle),
        ("feed", handle, ctypes.c_char_p, size),
        ("getformat", handle, *(ctypes.POINTER(each) for each in (ctypes.c_long, ctypes.c_int, ctypes.c_int))),
        ("read", handle, handle, size, ctypes.POINTER(size)),
    ):
        getattr(library, f"mpg123_{name}").argtypes = types
    return None if library.mpg123_init() else library


def decode(encoded: bytes, num_frames: int, num_channels: int, block: int) -> Iterator[NDArray[np.float32]]:
    """The first `num_frames` of a file, in parts of up to `block` frames (frames, channels) of full scale ±1, each until the
    next. Nothing without the library or of other channels, fewer frames where there are no more."""
    if (library := _library()) is None or not (handle := library.mpg123_new(None, None)):
        return
    try:
        rate, channels, encoding, size = ctypes.c_long(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        library.mpg123_param(handle, _ADD_FLAGS, _FLAGS, 0.0)
        if library.mpg123_open_feed(handle) or library.mpg123_feed(handle, encoded, len(encoded)):
            return
        if library.mpg123_getformat(handle, rate, channels, encoding):
            return
        if (channels.value, encoding.value) != (num_channels, _FLOAT32):
            return
        samples, state = np.empty((min(block, num_frames), num_channels), np.float32), 0
        while num_frames and not state:
            part = samples[:num_frames]
            state = library.mpg123_read(handle, part.ctypes.data, part.nbytes, size)
            part = part[: size.value // part.strides[0]]
            num_frames -= len(part)
            yield part
    finally:
        library.mpg123_delete(handle)
