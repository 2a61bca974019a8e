"""Write and read Parquet tables of vectors, and find the nearest rows to a vector.

For an unusable file, `vector` is NaN and `error` holds the reason. The metadata describe the model
as JSON.
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
from clap_ds.utils.files import pinned

if TYPE_CHECKING:
    from clap_ds.inference.model import EmbeddingRow

PARQUET = ".parquet"
METADATA = b"clap_ds"
ROWS = 16384
"""Rows in memory and in a Parquet row group: 32 MB if vectors have 512 elements."""


@dataclass(frozen=True)
class About:
    """Describe how a table's vectors were made, by arguments of `clap_ds.load` and
    `Clap.iter_windows`."""

    model: str
    fingerprint: str
    dim: PositiveInt
    pooling: str
    overlap: float
    precision: str
    tokenizer: str | None
    preset: str | None
    version: str


def text_of(name: object) -> str:
    """Return a file's or clip's name as valid UTF-8, with other bytes escaped like `\\xff`."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_suffix(path: Path) -> None:
    """Raise UserError if a table isn't .parquet or pyarrow isn't installed."""
    if path.suffix != PARQUET or importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"{path}: requires a name ending in {PARQUET}, and pyarrow: pip install 'clap-ds[embed]'"
        )


def _schema(about: About) -> Any:
    import pyarrow

    text = pyarrow.string()
    seconds = pyarrow.float64()
    vector = pyarrow.list_(pyarrow.float32(), about.dim)
    fields = [
        ("file", text),
        ("start_s", seconds),
        ("end_s", seconds),
        ("error", text),
        ("vector", vector),
    ]
    return pyarrow.schema(fields, metadata={METADATA: json.dumps(asdict(about))})


def write_table(
    file: BinaryIO, about: About, rows: Iterable[EmbeddingRow]
) -> tuple[int, list[tuple[str, str]]]:
    """Write a model's rows. Return their number, and the unusable files with reasons."""
    import pyarrow
    import pyarrow.parquet

    schema = _schema(about)
    rest = iter(rows)
    num_rows = 0
    left_out = list[tuple[str, str]]()
    none = np.full(about.dim, np.nan, np.float32)
    with pyarrow.parquet.ParquetWriter(
        file, schema, compression="none", use_dictionary=["file", "error"]
    ) as writer:
        while part := list(islice(rest, ROWS)):
            cells = [
                (text_of(row.source), row.start_s, row.end_s, text_of(row.error)) for row in part
            ]
            flat = np.concatenate([none if row.vector is None else row.vector for row in part])
            columns = [
                *zip(*cells, strict=True),
                pyarrow.FixedSizeListArray.from_arrays(flat, about.dim),
            ]
            writer.write_table(pyarrow.table(columns, schema=schema))
            num_rows += len(part)
            left_out += [(name, error) for name, _, _, error in cells if error]
    return num_rows, left_out


def read_table(path: Path) -> tuple[About, Iterator[Any]]:
    """Read a table's description and its rows in `pyarrow.RecordBatch`es. Raises ValueError if
    invalid."""
    check_suffix(path)
    import pyarrow.parquet

    try:
        with pinned(path) as opened:
            table = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
        about = TypeAdapter(About).validate_json(
            (table.schema_arrow.metadata or {}).get(METADATA, b"")
        )
        if not table.schema_arrow.equals(_schema(about)):
            raise ValueError(
                f"its columns are {', '.join(table.schema_arrow.names)}, or have other types"
            )
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise ValueError(f"{path}: expected a table of clap-ds embed: {error}") from None
    return about, table.iter_batches(ROWS)


def nearest(batches: Iterable[Any], query: NDArray[np.float32], top: int) -> list[dict[str, Any]]:
    """Return the `top` rows with the highest cosines (`score`) to a query, (dim,) of length 1.
    Stable; skips unusable files."""
    best: list[dict[str, Any]] = []
    for batch in batches:
        if any(column.null_count for column in batch.columns):
            raise ValueError("a table of vectors contains empty cells")
        scores = batch.column("vector").flatten().to_numpy(False).reshape(-1, len(query)) @ query
        order = np.argsort(-scores, kind="stable")[
            : min(top, np.isfinite(scores).sum())
        ]  # NaN is last
        rows = batch.drop_columns(["vector"]).take(order).to_pylist()
        best += [
            {**row, "score": score} for row, score in zip(rows, scores[order].tolist(), strict=True)
        ]
        best = sorted(best, key=lambda row: -row["score"])[:top]  # stable
    return best
