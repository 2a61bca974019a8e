"""A table of vectors while it is made: finished parts in a folder beside it, so that what was stopped goes on, on however many
ranks; then joined. A part has all rows of some files, and the files' sizes and times of change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from clap_ds.config.files import open_regular, replacing
from clap_ds.inference.files import Found, mark_of
from clap_ds.inference.vectors import (
    DAMAGE,
    NPZ,
    ROWS,
    About,
    Block,
    about_of,
    block_of,
    joined,
    read_npz,
    read_table,
    text_of,
    write_table,
)
from clap_ds.record.lock import FolderLock

if TYPE_CHECKING:
    from clap_ds.inference.model import Row

Marks: TypeAlias = dict[str, tuple[int, int]]
"""Files by name, with size and time of change."""
PART_ROWS, PART_S = 256, 60.0
"""Rows and seconds of work of a part, at least one of them, but for a rank's last: of long files a row may take minutes."""
_KEPT = 64  # parts in memory while they are joined
_SAID = ("fingerprint", "dim", "windows", "overlap", "precision")


class Parts:
    """The parts of a table.

    Args:
        output: the table's path; the folder is `output.parts`.
        about: without `files`.
    """

    def __init__(self, output: Path, about: About) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        self._output, self._about, self._lock = output, about, FolderLock(self.folder)

    def begin(self, sources: Mapping[str, Found]) -> tuple[Marks, Marks] | None:
        """Make the folder, or take that of a command that was stopped: all files, and those that no part has as they are now.
        None where the table is there already.

        Raises:
            ValueError: parts or table are there of another model, windows or, of the table, files; another command writes them.
            OSError: the folder can't be written.
        """
        marks = {name: mark_of(source) for name, source in sources.items()}
        self._about = replace(self._about, files=hashlib.sha256(json.dumps(marks).encode()).hexdigest())
        if self._output.exists() and not self.folder.exists():
            self._check(read_table(self._output)[0], f"{self._output} is there", (*_SAID, "files"))
            return None
        self._lock.acquire()
        done = self._find(marks)
        return marks, {name: mark for name, mark in marks.items() if name not in done}

    def write(self, rows: Iterable[Row], marks: Marks) -> Iterator[str]:
        """Write rows, which come file by file, in parts; gives each file's name as its first row comes. OSError where the
        folder can't be written: parts that are finished stay."""
        block: list[Row] = []
        begun = monotonic()
        for row in rows:
            if not block or row.source != block[-1].source:
                if block and (len(block) >= PART_ROWS or monotonic() - begun >= PART_S):
                    self._write(block, marks)
                    block, begun = [], monotonic()
                yield text_of(row.source)
            block.append(row)
        if block:
            self._write(block, marks)

    def join(self, marks: Marks) -> tuple[int, list[tuple[str, str]]]:
        """Write the table, in the order of its files, and delete the parts: how many rows it has, and which files have none,
        with the reasons. Raises OSError where it can't be written: the parts stay."""
        left_out: list[tuple[str, str]] = []
        found, num_rows = self._find(marks), 0

        def blocks() -> Iterator[Block]:
            nonlocal num_rows
            for block in self._joined(found[name] for name in marks):
                num_rows += len(block.file)
                left_out.extend(block.left_out)
                yield block

        with replacing(self._output, self.folder) as file:
            write_table(file, self._output.suffix, self._about, blocks())
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return num_rows, left_out

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.release()

    def _check(self, found: About, where: str, names: tuple[str, ...] = _SAID) -> None:
        """ValueError where it is of other vectors than these."""
        if other := [name for name in names if getattr(found, name) != getattr(self._about, name)]:
            said = (f"{name} {getattr(found, name)!r}, now {getattr(self._about, name)!r}" for name in other)
            what = "of other files" if other == ["files"] else "; ".join(each for each in said if "files" not in each)
            raise ValueError(f"{where} already: {what}; delete it, or name another --output")

    def _write(self, rows: list[Row], marks: Marks) -> None:
        block = block_of(rows, self._about.dim)
        mark = np.array([marks[name] for name in block.file], np.int64)
        with replacing(self.folder / f"{os.urandom(8).hex()}{NPZ}") as file:
            write_table(file, NPZ, self._about, [block], mark=mark)

    def _find(self, marks: Marks) -> dict[str, tuple[Path, int, int]]:
        """Where the rows of files are that have these marks: the part, the first row and the one behind the last."""
        found = {}
        for path in sorted(self.folder.glob(f"*{NPZ}")):
            try:
                with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
                    about, names, of_rows = about_of(arrays["about"]), arrays["file"], arrays["mark"].tolist()
            except DAMAGE as error:
                raise ValueError(f"{path} can't be read: {error}; delete it") from None
            self._check(about, f"{self.folder} is there")
            begins = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(names)]
            for first, behind in pairwise(begins):
                if marks.get(name := str(names[first])) == tuple(of_rows[first]):
                    found[name] = path, first, behind
        return found

    def _joined(self, places: Iterable[tuple[Path, int, int]]) -> Iterator[Block]:
        """Blocks of the rows at these places."""
        read, pieces = lru_cache(_KEPT)(lambda path: read_npz(path)[1]), list[Block]()
        for path, first, behind in places:
            pieces.append(Block(*(column[first:behind] for column in read(path))))
            if sum(len(piece.file) for piece in pieces) >= ROWS:
                yield joined(pieces)
                pieces = []
        if pieces:
            yield joined(pieces)
