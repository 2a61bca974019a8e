"""Write and read Parquet tables of vectors in blocks, and find the nearest rows to a vector.

For an unusable file, `vector` is NaN and `error` holds the reason. The metadata describe the model as JSON.
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
        return [(str(file), str(error)) for file, error in zip(self.file, self.error, strict=True) if error]


def text_of(name: object) -> str:
    """Return a file's or clip's name as valid UTF-8, with other bytes escaped like `\\xff`."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def blocks_of(rows: Iterable[EmbeddingRow], dim: int, size: int = ROWS) -> Iterator[Block]:
    """Collect a model's rows in blocks of `size`."""
    rest, none = iter(rows), np.full(dim, np.nan, np.float32)
    while part := list(islice(rest, size)):
        cells = (
            (
                text_of(row.source),
                row.start_s,
                row.end_s,
                text_of(row.error),
                none if row.vector is None else row.vector,
            )
            for row in part
        )
        yield Block(*map(np.array, zip(*cells, strict=True)))


def check_suffix(path: Path) -> None:
    """Raise UserError if a table isn't .parquet or pyarrow isn't installed."""
    if path.suffix != PARQUET or importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: requires a name ending in {PARQUET}, and pyarrow: pip install 'clap-ds[embed]'")


def write_table(file: BinaryIO, about: About, blocks: Iterable[Block]) -> tuple[int, list[tuple[str, str]]]:
    """Write a table. Return its number of rows, and the unusable files with reasons."""
    import pyarrow
    import pyarrow.parquet

    text, seconds, vector = pyarrow.string(), pyarrow.float64(), pyarrow.list_(pyarrow.float32(), about.dim)
    fields = zip(Block._fields, (text, seconds, seconds, text, vector), strict=True)
    schema = pyarrow.schema(fields, metadata={METADATA: json.dumps(asdict(about))})
    num_rows, left_out = 0, list[tuple[str, str]]()
    with pyarrow.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=["file", "error"]) as writer:
        for block in blocks:
            flat = pyarrow.array(block.vector.reshape(-1))
            columns = [*block[:4], pyarrow.FixedSizeListArray.from_arrays(flat, about.dim)]
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=ROWS)
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
    for batch in table.iter_batches(ROWS):
        *columns, flat = (each.to_numpy(False) for each in (*batch.columns[:4], batch.columns[4].flatten()))
        yield Block._make([*columns, flat.reshape(-1, dim)])


def nearest(blocks: Iterable[Block], query: NDArray[np.float32], top: int) -> list[tuple[float, str, float, float]]:
    """Return the `top` rows with the highest cosines to a query, (dim,) of length 1: cosine, file, start and end in s.
    Stable; skips rows without a vector."""
    best: list[tuple[float, str, float, float]] = []
    for block in blocks:
        scores = block.vector @ query
        order = np.argsort(-scores, kind="stable")[: min(top, np.isfinite(scores).sum())]  # NaN is last
        columns = (each[order].tolist() for each in (scores, block.file, block.start_s, block.end_s))
        best = sorted([*best, *zip(*columns, strict=True)], key=lambda row: -row[0])[:top]  # stable
    return best
