"""Files replaced in one go."""

from __future__ import annotations

import contextlib
import os


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file in one go: a reader sees the old content, the new, or no file."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")  # process ids repeat from host to host
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a signal's, too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
