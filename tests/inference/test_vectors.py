"""Test tables of vectors: round trips, rejection of other files, and nearest rows."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from clap_ds.inference import vectors
from clap_ds.inference.audio_windows import EmbeddingRow
from clap_ds.inference.vectors import About, nearest, read_table, write_table
from clap_ds.utils.errors import UserError

ABOUT = About("/model", "f00d", 4, "none", 0.5, "fp32", None, None, "0.1.0")


def rows(number: int) -> list[EmbeddingRow]:
    """Return unit vectors, some of them equal, with every fifth missing."""
    found = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)[:number]
    found[70:80] = found[: len(found[70:80])]
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    of_each = [
        EmbeddingRow(f"sounds/ä\n{n}.wav", n, n + 10, vector) for n, vector in enumerate(found)
    ]
    return [
        EmbeddingRow(row.source, 0, 0, error="silent") if n % 5 == 3 else row
        for n, row in enumerate(of_each)
    ]


def write(path: Path, number: int) -> Path:
    with path.open("wb") as file:
        assert write_table(file, ABOUT, rows(number)) == (
            number,
            [(r.source, r.error) for r in rows(number) if r.error],
        )
    return path


def test_a_table_is_read_by_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "ROWS", 8)
    path = write(tmp_path / "vectors.parquet", 27)
    about, batches = read_table(path)
    assert about == ABOUT
    assert max(len(batch) for batch in batches) <= 8
    assert json.loads(pyarrow.parquet.read_schema(path).metadata[b"clap_ds"]) == asdict(ABOUT)
    for (_, found), row in zip(pandas.read_parquet(path).iterrows(), rows(27), strict=True):
        assert (*found[:4],) == (row.source, row.start_s, row.end_s, row.error)
        np.testing.assert_array_equal(
            found["vector"], [np.nan] * 4 if row.vector is None else row.vector
        )


def test_other_files_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), foreign := tmp_path / "foreign.parquet")
    for path in (foreign, tmp_path / "v.npz"):
        with pytest.raises((ValueError, UserError), match=re.escape(f"{path}: ")):
            read_table(path)


@pytest.mark.parametrize("column", ["start_s", "vector"])
def test_columns_of_other_types_and_empty_cells_are_refused(tmp_path: Path, column: str) -> None:
    table = pyarrow.parquet.read_table(write(tmp_path / "vectors.parquet", 9))
    index = table.schema.get_field_index(column)
    for values in (pyarrow.array(["x"] * 9), pyarrow.nulls(9, table.schema.field(column).type)):
        changed = table.set_column(index, column, values)
        pyarrow.parquet.write_table(changed, tmp_path / "theirs.parquet")
        with pytest.raises(ValueError, match=r"columns|empty cells"):
            nearest(read_table(tmp_path / "theirs.parquet")[1], np.ones(4, np.float32), 3)


def test_the_nearest_are_those_of_all_rows_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = np.array([0.5, -0.5, 0.5, 0.5], np.float32)
    path = write(tmp_path / "vectors.parquet", 100)
    scored = [(row, float(row.vector @ query)) for row in rows(100) if row.vector is not None]
    expected = sorted(scored, key=lambda pair: -round(pair[1], 5))  # stable
    for size in (1, 7, 100):
        monkeypatch.setattr(vectors, "ROWS", size)
        for top in (1, 10, 1000):
            found = nearest(read_table(path)[1], query, top)
            assert [(each["file"], each["start_s"]) for each in found] == [
                (r.source, r.start_s) for r, _ in expected[:top]
            ]
            np.testing.assert_allclose(
                [each["score"] for each in found], [s for _, s in expected[:top]], atol=4e-7
            )
