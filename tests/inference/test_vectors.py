"""Test tables of vectors: round trips, rejection of other files, and nearest rows."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from clap_ds.config.errors import UserError
from clap_ds.inference import vectors
from clap_ds.inference.vectors import About, Block, nearest, read_table, write_table
from tests.inference.conftest import joined

ABOUT = About("/model", "f00d", 4, "none", 0.5, "fp32", None, None, "0.1.0")


def rows(number: int, seed: int = 0) -> Block:
    """Return unit vectors, with every fifth missing."""
    found = np.random.default_rng(seed).standard_normal((number, 4)).astype(np.float32)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    broken = np.arange(number) % 5 == 3
    found[broken] = np.nan
    start = np.where(broken, 0.0, np.arange(number))
    names = np.array([f"sounds/ä\n{n}.wav" for n in range(number)])
    return Block(names, start, start + 10, np.where(broken, "audio is silent", ""), found)


def write(path: Path, *blocks: Block) -> Path:
    with path.open("wb") as file:
        write_table(file, ABOUT, blocks)
    return path


def test_a_table_is_read_as_written_by_pandas_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "ROWS", 8)
    path = write(tmp_path / "vectors.parquet", rows(20), rows(7, 1))
    about, blocks = read_table(path)
    found = list(blocks)
    assert about == ABOUT
    assert max(len(block.file) for block in found) <= 8
    for column, expected in zip(joined(found), joined([rows(20), rows(7, 1)]), strict=True):
        np.testing.assert_array_equal(column, expected)
    table = pyarrow.parquet.read_table(path)
    assert json.loads(table.schema.metadata[b"clap_ds"]) == asdict(ABOUT)
    np.testing.assert_array_equal(np.stack(table.to_pandas()["vector"][:5]), rows(5).vector)


def test_other_files_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), foreign := tmp_path / "foreign.parquet")
    for path in (foreign, tmp_path / "v.npz"):
        with pytest.raises((ValueError, UserError), match=re.escape(f"{path}: ")):
            read_table(path)


def test_the_nearest_are_those_of_all_rows_sorted() -> None:
    block, query = rows(100), np.array([0.5, -0.5, 0.5, 0.5], np.float32)
    block.vector[70:80] = block.vector[0:10]  # so that some are equal
    scores = block.vector @ query
    order = [n for n in np.lexsort((np.arange(100), -scores)) if not np.isnan(scores[n])]
    for size in (1, 7, 100):
        pieces = [Block(*(column[at : at + size] for column in block)) for at in range(0, 100, size)]
        for top in (1, 10, 1000):
            found = nearest(pieces, query, top)
            assert [file for _, file, *_ in found] == block.file[order[:top]].tolist()
            np.testing.assert_allclose([score for score, *_ in found], scores[order[:top]], rtol=0, atol=4 * 2**-24)
