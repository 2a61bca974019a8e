"""Test tables of vectors: round trips, rejection of other files, and nearest rows."""

from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from clap_ds.inference import vectors
from clap_ds.inference.audio_windows import EmbeddingRow
from clap_ds.inference.vectors import TableMetadata, find_nearest, read_table, write_table

METADATA = TableMetadata("/model", "f00d", 4, "none", 0.5, "fp32", None, None, "0.1.0")


def make_rows(num_rows: int) -> list[EmbeddingRow]:
    """Return unit vectors, of which ten are equal to others, with every fifth missing."""
    units = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)
    units[70:80] = units[:10]
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    rows = []
    for number, vector in enumerate(units[:num_rows]):
        row = EmbeddingRow(f"sounds/ä\n{number}.wav", number, number + 10, vector)
        if number % 5 == 3:
            row = EmbeddingRow(row.source, 0, 0, error="silent")
        rows.append(row)
    return rows


def write_rows(path: Path, num_rows: int) -> Path:
    rows = make_rows(num_rows)
    with path.open("wb") as file:
        skipped = [(row.source, row.error) for row in rows if row.error]
        assert write_table(file, METADATA, rows) == (num_rows, skipped)
    return path


def test_table_is_readable_by_pandas(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "ROWS", 8)
    path = write_rows(tmp_path / "vectors.parquet", 27)
    metadata, batches = read_table(path)
    assert metadata == METADATA
    assert max(len(batch) for batch in batches) <= 8
    table = pandas.read_parquet(path)
    for (_, cells), row in zip(table.iterrows(), make_rows(27), strict=True):
        assert (*cells[:4],) == (row.source, row.start_s, row.end_s, row.error)
        vector = np.full(4, np.nan) if row.vector is None else row.vector
        np.testing.assert_array_equal(cells["vector"], vector)


def test_foreign_columns_and_empty_cells_are_rejected(tmp_path):
    table = pyarrow.parquet.read_table(write_rows(tmp_path / "vectors.parquet", 9))
    for values in (pyarrow.array(["x"] * 9), pyarrow.nulls(9, pyarrow.float64())):
        changed = table.set_column(1, "start_s", values)
        pyarrow.parquet.write_table(changed, tmp_path / "foreign.parquet")
        with pytest.raises(ValueError, match=r"columns|empty cells"):
            find_nearest(read_table(tmp_path / "foreign.parquet")[1], np.ones(4, np.float32), 3)


def test_nearest_rows_equal_a_sort_of_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "ROWS", 7)
    path = write_rows(tmp_path / "vectors.parquet", 100)
    query = np.array([0.5, -0.5, 0.5, 0.5], np.float32)
    rows = [row for row in make_rows(100) if row.vector is not None]
    scores = np.array([row.vector @ query for row in rows])
    # Equal vectors have equal rounded scores, and stay in order.
    order = np.argsort(-scores.round(5), kind="stable")
    for top in (10, 1000):
        best = find_nearest(read_table(path)[1], query, top)
        assert [row["file"] for row in best] == [rows[number].source for number in order[:top]]
        np.testing.assert_allclose([row["score"] for row in best], scores[order[:top]], atol=4e-7)
