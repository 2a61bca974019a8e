"""What this rank is doing, for the agent of its host: a note that outlives a hang, and every thread's stack when it is asked.

Where the agent has set CLAP_PROGRESS, a folder on the host, `<rank>` there holds one line of JSON of always the same length,
with `at` in seconds of the host's monotonic clock, and SIGUSR2 appends stacks to `<rank>.stacks`. Without it nothing here does
anything. When to call something a hang is left to the agent. Standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOTE_BYTES = 256
STARTING, STEP, ENDING = "starting", "step", "ending"
"""What is done before the first step, between steps, and when they are over."""


class _Notes:
    """One rank's note: opened once, then rewritten in place."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank, self._path = rank, folder / str(rank)
        self.steps, self.made, self.doing = 0, 0, STARTING
        append = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # whoever reads the stacks may also empty the file
        faulthandler.register(signal.SIGUSR2, os.open(folder / f"{rank}.stacks", append, 0o644), all_threads=True)
        self._note = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self.write()

    def write(self) -> None:
        note = (
            f'{{"rank": {self._rank}, "pid": {os.getpid()}, "step": {self.steps}, "made": {self.made},'
            f' "doing": "{self.doing}", "at": {time.monotonic():.3f}}}'
        )
        try:
            os.pwrite(self._note, f"{note:<{NOTE_BYTES - 1}}\n".encode(), 0)
        except OSError as error:
            forget()  # a note that is never renewed would look like a hang
            print(f"warning: {self._path} can't be written: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the note away. SIGUSR2 still writes stacks: without, it would end the process."""
        with suppress(OSError):
            os.close(self._note)
            self._path.unlink()


_notes: _Notes | None = None  # a process is one rank


def start(rank: int) -> None:
    """Begin to note, where the environment asks for it; the rank is "starting" from here to its first step."""
    global _notes
    folder = os.environ.get("CLAP_PROGRESS")
    if not folder or _notes is not None:
        return
    try:
        _notes = _Notes(Path(folder), rank)
    except OSError as error:
        print(f"warning: CLAP_PROGRESS={folder} can't be written: {error.strerror}", file=sys.stderr, flush=True)


def forget() -> None:
    """Note no more, and leave no note behind."""
    global _notes
    notes, _notes = _notes, None
    if notes is not None:
        notes.close()


def step(number: int) -> None:
    """An optimiser step has been made, the `number`th of the training."""
    if _notes is not None:
        _notes.steps, _notes.doing = number, STEP
        _notes.made += 1
        _notes.write()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """While the body runs, which may take long, this rank is doing `what`: plain words, without quotation marks."""
    if _notes is None:
        yield
        return
    before = _note(what)
    try:
        yield
    finally:
        if _notes is not None and _notes.doing == what:
            _note(before)


def ending() -> None:
    """This rank makes no more steps: what follows takes as long as it takes."""
    _note(ENDING)


def _note(what: str) -> str:
    """Renew the note; what it said before."""
    if _notes is None:
        return what
    before, _notes.doing = _notes.doing, what
    _notes.write()
    return before
