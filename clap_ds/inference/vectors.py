"""Parquet tables of vectors: write and read them, and find the rows nearest to a vector.

For an unusable file, `vector` is NaN and `error` holds the reason. The file's metadata describe the
model as JSON.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, TypeAdapter

from clap_ds.utils.errors import UserError
from clap_ds.utils.files import hold_file

if TYPE_CHECKING:
    from clap_ds.inference.model import EmbeddingRow

PARQUET = ".parquet"
# Key of the schema's metadata.
METADATA = b"clap_ds"
# Rows in memory and in a Parquet row group: 32 MB if vectors have 512 elements.
ROWS = 16384


@dataclass(frozen=True)
class TableMetadata:
    """How a table's vectors were made: arguments of `clap_ds.load` and `Clap.iter_windows`."""

    model: str
    fingerprint: str
    dim: PositiveInt
    pooling: str
    overlap: float
    precision: str
    tokenizer: str | None
    preset: str | None
    version: str


def to_utf8(name: object) -> str:
    """Return a file's or clip's name as valid UTF-8, with other bytes escaped like `\\xff`."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_suffix(path: Path) -> None:
    """Raise UserError if a table isn't .parquet or pyarrow isn't installed."""
    if path.suffix != PARQUET or importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"{path}: requires a name ending in {PARQUET}, and pyarrow: pip install 'clap-ds[embed]'"
        )


def _import_pyarrow() -> Any:
    """Import pyarrow, which is optional, with its module `parquet`."""
    import pyarrow.parquet

    return pyarrow


def _schema(metadata: TableMetadata) -> Any:
    pyarrow = _import_pyarrow()
    text = pyarrow.string()
    seconds = pyarrow.float64()
    fields = {
        "file": text,
        "start_s": seconds,
        "end_s": seconds,
        "error": text,
        "vector": pyarrow.list_(pyarrow.float32(), metadata.dim),
    }
    return pyarrow.schema([*fields.items()], metadata={METADATA: json.dumps(asdict(metadata))})


def write_table(
    file: BinaryIO, metadata: TableMetadata, rows: Iterable[EmbeddingRow]
) -> tuple[int, list[tuple[str, str]]]:
    """Write a model's rows. Return their number, and the unusable files with reasons."""
    pyarrow = _import_pyarrow()
    schema = _schema(metadata)
    num_rows = 0
    skipped: list[tuple[str, str]] = []
    no_vector = np.full(metadata.dim, np.nan, np.float32)
    # Vectors don't compress, and file names repeat.
    options: Any = {"compression": "none", "use_dictionary": ["file", "error"]}
    with pyarrow.parquet.ParquetWriter(file, schema, **options) as writer:
        unwritten = iter(rows)
        # A row group at a time, in constant memory.
        while group := list(islice(unwritten, ROWS)):
            files = [to_utf8(row.source) for row in group]
            errors = [to_utf8(row.error) for row in group]
            vectors = [no_vector if row.vector is None else row.vector for row in group]
            columns = [
                files,
                [row.start_s for row in group],
                [row.end_s for row in group],
                errors,
                pyarrow.FixedSizeListArray.from_arrays(np.concatenate(vectors), metadata.dim),
            ]
            writer.write_table(pyarrow.table(columns, schema=schema))
            num_rows += len(group)
            skipped += [pair for pair in zip(files, errors, strict=True) if pair[1]]
    return num_rows, skipped


def read_table(path: Path) -> tuple[TableMetadata, Iterator[Any]]:
    """Read a table's description and its rows in `pyarrow.RecordBatch`es.

    Raises ValueError if the file is no such table.
    """
    check_suffix(path)
    pyarrow = _import_pyarrow()
    try:
        with hold_file(path) as opened:
            # Without `pre_buffer`, only one row group is in memory.
            table = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
        schema = table.schema_arrow
        metadata = TypeAdapter(TableMetadata).validate_json(
            (schema.metadata or {}).get(METADATA, b"")
        )
        if not schema.equals(_schema(metadata)):
            raise ValueError(f"its columns are {', '.join(schema.names)}, or have other types")
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise ValueError(f"{path}: expected a table of clap-ds embed: {error}") from None
    return metadata, table.iter_batches(ROWS)


def find_nearest(
    batches: Iterable[Any], query: NDArray[np.float32], top: int
) -> list[dict[str, Any]]:
    """Return the `top` rows with the highest cosines (`score`) to a query, (dim,) of length 1.

    Rows of equal scores stay in order. Unusable files are skipped.
    """
    best: list[dict[str, Any]] = []
    for batch in batches:
        # Only foreign tables have them.
        if any(column.null_count for column in batch.columns):
            raise ValueError("a table of vectors contains empty cells")
        vectors = batch.column("vector").flatten().to_numpy(False).reshape(-1, len(query))
        scores = vectors @ query
        # Scores of unusable files are NaN, which `argsort` places last.
        num_rows = min(top, np.isfinite(scores).sum())
        order = np.argsort(-scores, kind="stable")[:num_rows]
        rows = batch.drop_columns(["vector"]).take(order).to_pylist()
        for row, score in zip(rows, scores[order].tolist(), strict=True):
            best.append({**row, "score": score})
        # `sorted` is stable, and rows of earlier batches come first.
        best = sorted(best, key=lambda row: -row["score"])[:top]
    return best
