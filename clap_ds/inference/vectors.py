"""Write and read Parquet tables of vectors in blocks, and find the nearest rows to a vector.

`vector` is null and `error` holds the reason for an unusable file. The metadata describe the model as JSON.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, TypeAdapter

from clap_ds.config.errors import UserError

if TYPE_CHECKING:
    from clap_ds.inference.model import EmbeddingRow

PARQUET = ".parquet"
METADATA = b"clap_ds"
ROWS = 16384
"""Rows per block and Parquet row group: 32 MB if vectors have 512 elements."""


@dataclass(frozen=True)
class About:
    """Describe how a table's vectors were made, by arguments of `clap_ds.load` and `Clap.iter_windows`."""

    model: str
    fingerprint: str
    dim: PositiveInt
    pooling: str
    overlap: float
    precision: str
    tokenizer: str | None
    preset: str | None
    version: str


class Block(NamedTuple):
    """Hold rows of a table as columns: text, float64, and `vector` (rows, dim) float32, NaN if missing."""

    file: NDArray[Any]
    start_s: NDArray[Any]
    end_s: NDArray[Any]
    error: NDArray[Any]
    vector: NDArray[Any]

    @property
    def left_out(self) -> list[tuple[str, str]]:
        """List unusable files and the reasons."""
        return [(str(self.file[n]), str(self.error[n])) for n in np.flatnonzero(self.error != "")]


def text_of(name: object) -> str:
    """Return a file's or clip's name as valid UTF-8, with other bytes escaped like `\\xff`."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def blocks_of(rows: Iterable[EmbeddingRow], dim: int, size: int = ROWS) -> Iterator[Block]:
    """Collect a model's rows in blocks of `size`."""
    rest, none = iter(rows), np.full(dim, np.nan, np.float32)
    while part := list(islice(rest, size)):
        files, errors = (np.array([text_of(getattr(row, name)) for row in part]) for name in ("source", "error"))
        start_s, end_s = np.array([(row.start_s, row.end_s) for row in part]).T
        vectors = np.stack([none if row.vector is None else row.vector for row in part])
        yield Block(files, start_s, end_s, errors, vectors)


def check_suffix(path: Path) -> None:
    """Raise UserError if a table isn't .parquet or pyarrow isn't installed."""
    if path.suffix != PARQUET or importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: requires a name ending in {PARQUET}, and pyarrow: pip install 'clap-ds[embed]'")


def write_table(file: BinaryIO, about: About, blocks: Iterable[Block]) -> tuple[int, list[tuple[str, str]]]:
    """Write a table. Return its number of rows, and the unusable files with reasons."""
    import pyarrow
    import pyarrow.parquet

    kinds = pyarrow.string(), pyarrow.float64(), pyarrow.float64(), pyarrow.string()
    vector = pyarrow.list_(pyarrow.float32(), about.dim)
    fields = list(zip(Block._fields, (*kinds, vector), strict=True))
    schema = pyarrow.schema(fields, metadata={METADATA: json.dumps(asdict(about))})
    num_rows, left_out = 0, list[tuple[str, str]]()
    with pyarrow.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=["file", "error"]) as writer:
        for block in blocks:
            columns = [pyarrow.array(each, kind) for each, kind in zip(block, kinds, strict=False)]
            none, flat = np.isnan(block.vector).any(axis=1), pyarrow.array(block.vector.reshape(-1))
            columns.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=vector, mask=pyarrow.array(none)))
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema), row_group_size=ROWS)
            num_rows += len(block.file)
            left_out += block.left_out
    return num_rows, left_out


def read_table(path: Path) -> tuple[About, Iterator[Block]]:
    """Read a table's description and its rows in blocks, keeping at most two in memory. Raises ValueError if invalid."""
    check_suffix(path)
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        about = TypeAdapter(About).validate_json((table.schema_arrow.metadata or {}).get(METADATA, b""))
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise ValueError(f"{path}: expected a table of clap-embed: {error}") from None
    return about, _read_blocks(table, about.dim)


def _read_blocks(table: Any, dim: int) -> Iterator[Block]:
    for batch in table.iter_batches(ROWS, columns=list(Block._fields)):
        *columns, vectors = (batch.column(name) for name in Block._fields)
        found = np.full((len(vectors), dim), np.nan, np.float32)
        there = vectors.is_valid().to_numpy(zero_copy_only=False)
        found[there] = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)  # flatten omits null vectors
        yield Block(*(*(each.to_numpy(zero_copy_only=False) for each in columns), found))


def nearest(blocks: Iterable[Block], query: NDArray[np.float32], top: int) -> list[tuple[float, str, float, float]]:
    """Return the `top` rows with the highest cosines to a query, (dim,) of length 1: cosine, file, start and end in s.
    Stable; skips rows without a vector."""
    best: list[tuple[float, str, float, float]] = []
    for block in blocks:
        scores = block.vector @ query
        order = [n for n in np.argsort(-scores, kind="stable")[:top] if not np.isnan(scores[n])]
        rows = ((float(scores[n]), str(block.file[n]), float(block.start_s[n]), float(block.end_s[n])) for n in order)
        best = sorted([*best, *rows], key=lambda row: -row[0])[:top]  # stable
    return best
