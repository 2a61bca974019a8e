"""Tables of vectors: what is written is what is read, others are refused, and the nearest rows are found."""

import json
import re
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from clap_ds.inference import vectors
from clap_ds.inference.vectors import About, Block, joined, nearest, read_table, write_table

ABOUT = About("/model", "f00d", 4, "each", 0.5, "fp32", None, None, "0.1.0", "files")


def rows(number: int, seed: int = 0) -> Block:
    """Unit vectors, of which every fifth is missing."""
    found = np.random.default_rng(seed).standard_normal((number, 4)).astype(np.float32)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    broken = np.arange(number) % 5 == 3
    found[broken] = np.nan
    start = np.where(broken, 0.0, np.arange(number))
    names = np.array([f"sounds/ä\n{n}.wav" for n in range(number)])
    return Block(names, start, start + 10, np.where(broken, "audio is silent", ""), found)


def same(one: Block, other: Block) -> None:
    for name in Block._fields:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def write(path: Path, *blocks: Block, about: About = ABOUT) -> Path:
    with path.open("wb") as file:
        write_table(file, path.suffix, about, blocks)
    return path


@pytest.mark.parametrize("suffix", vectors.SUFFIXES)
def test_a_table_is_read_as_written(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "ROWS", 8)
    path = write(tmp_path / f"vectors{suffix}", rows(20), rows(7, 1))
    about, num_rows, blocks = read_table(path)
    found = list(blocks)
    assert (about, num_rows) == (ABOUT, 27)
    assert max(len(block.file) for block in found) <= 8
    same(joined(found), joined([rows(20), rows(7, 1)]))


def test_pandas_and_pyarrow_read_the_columns(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(write(tmp_path / "vectors.parquet", rows(5)))
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), 4)
    assert json.loads(table.schema.metadata[b"clap_ds"]) == asdict(ABOUT)
    assert [each is None for each in table["vector"].to_pylist()] == [False, False, False, True, False]
    np.testing.assert_array_equal(np.stack(table.to_pandas()["vector"][:3]), rows(5).vector[:3])


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    (text := tmp_path / "text.parquet").write_text("no table")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), foreign := tmp_path / "foreign.parquet")
    np.savez(pickled := tmp_path / "pickled.npz", about=np.array([{}]))
    (cut := tmp_path / "cut.npz").write_bytes(write(tmp_path / "whole.npz", rows(9)).read_bytes()[:-100])
    wide = write(tmp_path / "wide.npz", rows(9), about=replace(ABOUT, dim=5))
    for path in (text, foreign, pickled, cut, wide, tmp_path / "absent.npz", tmp_path):
        with pytest.raises((ValueError, vectors.UserError), match=re.escape(f"{path}: expected")):
            read_table(path)


def test_compressed_arrays_and_what_no_reader_foresees_are_refused(tmp_path: Path) -> None:
    with np.load(write(tmp_path / "whole.npz", rows(9))) as arrays:
        members = {f"{name}.npy": arrays.zip.read(f"{name}.npy") for name in arrays.files}
    for name, version in (("packed", 20), ("future", 99)):  # the version of zip that a reader needs
        with zipfile.ZipFile(path := tmp_path / f"{name}.npz", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content, zipfile.ZIP_DEFLATED if name == "packed" else zipfile.ZIP_STORED)
        path.write_bytes(path.read_bytes().replace(b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03" + bytes([version])))
        with pytest.raises(
            ValueError, match=r"packed\.npz: expected .* compressed|future\.npz: expected .* zip file version"
        ):
            read_table(path)


def test_the_nearest_are_those_of_all_rows_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    block, query = rows(100), np.array([0.5, -0.5, 0.5, 0.5], np.float32)
    block.vector[70:80] = block.vector[0:10]  # so that some are equal
    scores = block.vector @ query
    order = [n for n in np.lexsort((np.arange(100), -scores)) if not np.isnan(scores[n])]
    for size in (1, 7, 100):
        pieces = [Block(*(column[at : at + size] for column in block)) for at in range(0, 100, size)]
        for top in (1, 10, 1000):
            found = nearest(pieces, query, top)
            assert [each.file for each in found] == block.file[order[:top]].tolist()
            np.testing.assert_allclose([each.score for each in found], scores[order[:top]], rtol=0, atol=4 * 2**-24)
