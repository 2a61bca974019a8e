"""Tables of vectors: a row for each window of a file, in Parquet (written and read block by block) or NumPy's .npz; and the
rows that are nearest to a vector.

Columns: `file`; `start_s` and `end_s` (float64); `error` (why a file can't be used, else empty); `vector` (float32, of length
1; of what can't be used null in Parquet, NaN in .npz). What they were made by stands in Parquet's metadata and in the .npz
array `about`, as JSON. Others may have written the tables that are read.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, TypeAdapter

from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular, parse_json

if TYPE_CHECKING:
    from clap_ds.inference.model import Row

PARQUET, NPZ = SUFFIXES = (".parquet", ".npz")
METADATA = "clap_ds"
ROWS = 16384
"""Of a block, and of Parquet's row groups: 32 MB of 512 numbers each."""

DAMAGE = Exception
"""What reading a table raises that isn't one: zlib, zipfile and pyarrow have errors of their own."""


@dataclass(frozen=True)
class About:
    """What a table's vectors were made by.

    Attributes:
        model, tokenizer, preset: as `clap_ds.load` takes them.
        fingerprint: of the model's weights.
        dim: numbers in a vector.
        windows, overlap: as `Clap.iter_windows` takes them.
        files: hash of the files' names, sizes and times of change; empty while they are being embedded.
        version: of this project.
    """

    model: str
    fingerprint: str
    dim: PositiveInt
    windows: str
    overlap: float
    precision: str
    tokenizer: str | None
    preset: str | None
    version: str
    files: str = ""


class Block(NamedTuple):
    """Rows of a table: columns of equal length, texts, float64 and `vector` (rows, dim) float32; NaN where there is none."""

    file: NDArray[Any]
    start_s: NDArray[Any]
    end_s: NDArray[Any]
    error: NDArray[Any]
    vector: NDArray[Any]

    @property
    def left_out(self) -> list[tuple[str, str]]:
        """Files that can't be used, and why."""
        return [(str(self.file[n]), str(self.error[n])) for n in np.flatnonzero(self.error != "")]


class Found(NamedTuple):
    """A row: its cosine similarity to what was looked for, file and times."""

    score: float
    file: str
    start_s: float
    end_s: float


def text_of(name: object) -> str:
    """A file's or a clip's name as UTF-8 can have it: bytes that aren't, as `\\xff`."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def block_of(rows: Sequence[Row], dim: int) -> Block:
    """Rows as they come of a model."""
    none = np.full(dim, np.nan, np.float32)
    vectors = np.stack([none if row.vector is None else row.vector for row in rows])
    files, errors = (np.array([text_of(getattr(row, name)) for row in rows]) for name in ("source", "error"))
    start_s, end_s = (np.array([getattr(row, name) for row in rows], np.float64) for name in ("start_s", "end_s"))
    return Block(files, start_s, end_s, errors, vectors)


def joined(blocks: Sequence[Block]) -> Block:
    """Blocks one after the other as one."""
    return Block(*map(np.concatenate, zip(*blocks, strict=True)))


def check_suffix(path: Path, what: str) -> None:
    """UserError for a table of another kind than there are, or one that needs a package that isn't here."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{what} {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if path.suffix == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{what} {path}: .parquet needs pyarrow: pip install 'clap-ds[embed]'; .npz doesn't")


def write_table(file: BinaryIO, suffix: str, about: About, blocks: Iterable[Block], **more: NDArray[Any]) -> None:
    """Write a table in the format of a suffix; `more` arrays go into an .npz, which is put together in memory."""
    said = json.dumps(asdict(about))
    if suffix == NPZ:
        arrays: dict[str, Any] = {**joined(list(blocks))._asdict(), "about": np.array(said), **more}
        with zipfile.ZipFile(file, "w") as archive:  # np.savez can't take an array named `file`
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return
    import pyarrow
    import pyarrow.parquet

    kinds = pyarrow.string(), pyarrow.float64(), pyarrow.float64(), pyarrow.string()
    vector = pyarrow.list_(pyarrow.float32(), about.dim)
    schema = pyarrow.schema(list(zip(Block._fields, (*kinds, vector), strict=True)), metadata={METADATA: said})
    with pyarrow.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=["file", "error"]) as writer:
        for block in blocks:
            columns = [pyarrow.array(each, kind) for each, kind in zip(block, kinds, strict=False)]
            none, flat = np.isnan(block.vector).any(axis=1), pyarrow.array(block.vector.reshape(-1))
            columns.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=vector, mask=pyarrow.array(none)))
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema), row_group_size=ROWS)


def read_table(path: Path) -> tuple[About, int, Iterator[Block]]:
    """What a table was made by, how many rows it has, and these in blocks of at most `ROWS`, of which Parquet holds one or two
    in memory at a time. Raises ValueError where it can't be read or isn't such a table."""
    check_suffix(path, "table")
    try:
        if path.suffix == PARQUET:
            return _read_parquet(path)
        about, whole = read_npz(path)
    except DAMAGE as error:
        raise ValueError(f"{path}: expected a table of clap-embed: {error}") from None
    starts = range(0, len(whole.file), ROWS)
    return about, len(whole.file), (Block(*(each[start : start + ROWS] for each in whole)) for start in starts)


def about_of(said: object) -> About:
    """What JSON in a table says; raises one of `DAMAGE`."""
    content = parse_json(str(said))
    return TypeAdapter(About).validate_python({each.name: content[each.name] for each in fields(About)})


def read_npz(path: Path) -> tuple[About, Block]:
    """All of a table in .npz. Raises one of `DAMAGE`."""
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        if any(member.compress_type != zipfile.ZIP_STORED for member in arrays.zip.infolist()):
            raise ValueError("its arrays are compressed, by which a small file can fill the memory")
        about, found = about_of(arrays["about"]), Block(*(arrays[name] for name in Block._fields))
    lengths, kinds = {len(each) for each in found}, [each.dtype.kind for each in found]
    if len(lengths) != 1 or kinds != ["U", "f", "f", "U", "f"] or found.vector.shape[1:] != (about.dim,):
        raise ValueError(f"its arrays {', '.join(Block._fields)} aren't of one length and of those kinds")
    return about, found


def _read_parquet(path: Path) -> tuple[About, int, Iterator[Block]]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(open_regular(path), pre_buffer=False)
    schema = table.schema_arrow
    if METADATA.encode() not in (schema.metadata or {}):
        raise ValueError(f"its metadata lack {METADATA!r}")
    about = about_of(schema.metadata[METADATA.encode()].decode())
    found = {field.name: field.type for field in schema}
    if found.get("vector") != pyarrow.list_(pyarrow.float32(), about.dim) or not found.keys() >= {*Block._fields}:
        raise ValueError(f"expected columns {', '.join(Block._fields)}, found {', '.join(map(str, schema))}")
    return about, table.metadata.num_rows, _parquet_blocks(path, table, about.dim)


def _parquet_blocks(path: Path, table: Any, dim: int) -> Iterator[Block]:
    try:
        for batch in table.iter_batches(ROWS, columns=list(Block._fields)):
            *columns, vectors = [batch.column(name) for name in Block._fields]
            found = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)  # of rows that have one
            if vectors.null_count:
                none = vectors.is_null().to_numpy(zero_copy_only=False)
                found, some = np.full((len(vectors), dim), np.nan, np.float32), found
                found[~none] = some
            yield Block(*(*(each.to_numpy(zero_copy_only=False) for each in columns), found))
    except DAMAGE as error:
        raise ValueError(f"{path} can't be read to its end: {error}") from None


def nearest(blocks: Iterable[Block], query: NDArray[np.float32], top: int) -> list[Found]:
    """The `top` rows of the highest scores, the highest first and of equal ones the earlier first; rows without a vector are
    left out.

    Args:
        query: (dim,), of length 1, as the rows' vectors are.
    """
    best: list[Found] = []
    for block in blocks:
        scores = block.vector @ query
        least = best[-1].score if len(best) == top else -np.inf
        better = np.flatnonzero(scores > least)  # not where NaN
        better = better[np.argsort(-scores[better], kind="stable")[:top]]
        rows = (
            Found(float(scores[n]), str(block.file[n]), *map(float, (block.start_s[n], block.end_s[n]))) for n in better
        )
        best = sorted([*best, *rows], key=lambda row: -row.score)[:top]  # stable
    return best
