"""A linear probe: logistic regression on frozen vectors, as CLIP's (arXiv 2103.00020), one-vs-rest where files have several
classes. Its regularisation is chosen within what it is trained on: by holding out each fold where three or more are said, as
clips of one recording share a fold, else stratified fifths of the files. What it is tested on has no part in that.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, StratifiedGroupKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.data.captions import names_in_cell
from clap_ds.data.shard_making.caption_lists import AUDIO_SUFFIXES, COLUMN_IN_NAME, is_of_audio, path_in, rows_of
from clap_ds.inference.vectors import About, joined, read_table

STRENGTHS = [10.0**power for power in range(-6, 3)]
"""scikit-learn's `C`, the inverse of regularisation, for numbers of variance 1."""
MANY = 10_000  # windows, of which one inner fold tells enough
UNKNOWN, UNSAID = "rows aren't in the table", "rows have no label or no fold"
UNHEARD, UNLISTED = "labelled files have no vector", "files of the table have no label"
Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """N files of K classes with R vectors, one for each window: `vectors` (R, D) float32 and finite, and `file_of` them (R,);
    bool `of_class` (N, K), one a file unless `is_multi`; `folds` (N,) text; names `left_out`, by why."""

    vectors: NDArray[np.float32]
    file_of: Rows
    classes: list[str]
    of_class: Mask
    is_multi: bool
    folds: NDArray[Any]
    left_out: dict[str, list[str]]


def read_labelled(options: Namespace) -> tuple[About, Labelled]:
    """What `clap-embed` wrote, with labels of the same files. UserError where it or a list can't be read or lacks a column, a
    row may mean two files, rows of one file contradict each other, or no file has both."""
    about, number, blocks = read_table(options.vectors)
    if not number:
        raise UserError(f"{options.vectors}: no rows in it")
    table = joined(list(blocks))
    names, vectors = table.file.astype(str), table.vector
    is_usable, by_name = np.isfinite(vectors).all(axis=1), dict[str, list[str]]()
    there, heard = dict.fromkeys(names.tolist()), {*names[is_usable].tolist()}
    for file in there:
        by_name.setdefault(_parts(file)[0], []).append(file)
    said: dict[str, tuple[str, str, set[str]]] = {}
    left_out: dict[str, list[str]] = {UNKNOWN: [], UNSAID: []}
    for where, path, of, fold in _rows_said(options):
        parts = _parts(path)  # which agree with a file's as far as both say folders
        near = [
            each for each in by_name.get(parts[0], ())
            if all(a == b for a, b in zip(parts, _parts(each), strict=False))
        ]  # fmt: skip
        if len(files := [path] if path in there else near) > 1:
            told = f"{path!r} may be {files[0]!r} or {files[1]!r}"
            raise UserError(f"{where}: {told}: say folders, too, by --file_column")
        if not files or not of or fold is None:
            left_out[UNSAID if files else UNKNOWN].append(path)
            continue
        before = said.setdefault(files[0], (path, fold, {*of}))
        before[2].update(of)
        if before[:2] != (path, fold) or (options.label_column and len(before[2]) > 1):
            told = f"{path!r}, {of}, fold {fold!r}; elsewhere {before[0]!r}, {sorted(before[2])}, fold {before[1]!r}"
            raise UserError(f"{where}: {files[0]!r} is {told}: expected one name, class and fold")
    numbers = {file: number for number, file in enumerate(file for file in said if file in heard)}
    left_out[UNHEARD] = [file for file in said if file not in heard]
    left_out[UNLISTED] = [file for file in there if file not in said]
    if not numbers:
        told = "; ".join(f"{len(each):,} {why}, such as {each[0]!r}" for why, each in left_out.items() if each)
        raise UserError(f"{options.vectors}: no file with a vector there and a label in {options.labels[0]}: {told}")
    file_of = np.array([numbers.get(name, -1) for name in names.tolist()])
    is_used, classes = is_usable & (file_of >= 0), sorted({name for file in numbers for name in said[file][2]})
    of_class = np.array([[name in said[file][2] for name in classes] for file in numbers])
    folds, is_multi = np.array([said[file][1] for file in numbers]), options.label_column is None
    return about, Labelled(vectors[is_used], file_of[is_used], classes, of_class, is_multi, folds, left_out)


def _parts(name: str) -> list[str]:
    """Of a path, from its end, without an extension of audio; of `tar: key` the key's."""
    path = PurePosixPath(normalize("NFC", name.rpartition(".tar: ")[2].replace("\\", "/")))
    last = path.stem if path.suffix.lower() in AUDIO_SUFFIXES else path.name
    return [last, *(part for part in reversed(path.parts[:-1]) if part not in ("..", "/"))]


def _rows_said(options: Namespace) -> Iterator[tuple[str, str, list[str], str | None]]:
    """Of each row: where it stands, its file, classes and fold, None for an empty cell. Of several lists each is a fold, by its
    name, unless a column says it."""
    label, in_column = options.label_column or options.list_column, options.fold_column
    for source in options.labels:
        rows, columns = rows_of(source, options.encoding)
        file = options.file_column or next(filter(is_of_audio, columns), "")
        for option, name in (("file", file), ("label", label), ("fold", in_column)):
            for column in [] if name is None else COLUMN_IN_NAME.findall(name) or [name]:
                if column not in columns:
                    there = did_you_mean(column, columns, 99)
                    raise UserError(f"{source}: no column {column!r}{there}; say which by --{option}_column")
        for line, row in rows:
            cell, usual = row.get(label), source.stem if len(options.labels) > 1 else ""
            if isinstance(cell, list) and options.label_column:
                raise UserError(f"{source}:{line}: {cell} in {label}: expected one class, or --list_column {label}")
            if not isinstance(cell, list):
                cell = names_in_cell(_text(cell)) if options.list_column else [cell]
            fold = (_text(row.get(in_column)) or None) if in_column else usual
            yield f"{source}:{line}", path_in(row, file), [text for each in cell if (text := _text(each))], fold


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def split(data: Labelled, options: Namespace) -> list[tuple[str, Mask, Mask]]:
    """Name, files to train on and to test on (N,): of each fold, stratified ones where none are said, or of those of
    `test_folds` together. UserError for unknown folds, classes that only a test has, and too few to train on."""
    in_fold: NDArray[Any] = data.folds
    test, train = options.test_folds, options.train_folds
    if not any(in_fold):
        in_fold, files = np.empty(len(in_fold), "U9"), np.arange(len(in_fold))
        for name, (_, rows) in enumerate(_stratified(data.of_class, files, options.folds), start=1):
            in_fold[rows] = name
    folds, found = sorted({*in_fold.tolist()}, key=lambda name: (len(name), name)), []
    if unknown := [name for name in (*test, *train) if name not in folds]:
        raise UserError(f"no file is of fold {unknown[0]!r}{did_you_mean(unknown[0], folds)}")
    for held in [test] if test else [[name] for name in folds]:
        is_test, where = np.isin(in_fold, held), f"fold {', '.join(held)}"
        is_train = np.isin(in_fold, train or folds) & ~is_test
        trained, tested = data.of_class[is_train].any(axis=0), data.of_class[is_test].any(axis=0)
        if trained.sum() < 2:
            raise UserError(f"{where}: what is left to train on has {trained.sum()} classes, expected two or more")
        if unseen := [data.classes[number] for number in np.flatnonzero(tested & ~trained)]:
            raise UserError(f"{where}: only its files are of {', '.join(map(repr, unseen[:5]))}: they can't be learned")
        found.append((", ".join(held), is_train, is_test))
    return found


def probe(data: Labelled, fold: str, is_train: Mask, is_test: Mask) -> dict[str, Any]:
    """Choose the regularisation within the files to train on, train on all of these, test: a file has the mean of its windows'
    probabilities. All windows of a file are on one side, within, too.

    Returns:
        `fold`; `C`; `files` tested; `value`, accuracy or mean average precision over the classes tested; `chance`, that of the
        same probabilities for every file; `classes`, of each tested its files and own value.
    """
    trained, tested = is_train[data.file_of], is_test[data.file_of]
    of, of_class = data.file_of[trained], data.of_class[data.file_of[trained]]
    groups = np.unique(data.folds[of], return_inverse=True)[1]
    inner: Any = LeaveOneGroupOut().split(groups, groups=groups) if groups.max() > 1 else _stratified(of_class, of, 5)
    one = LogisticRegression(max_iter=1000, tol=1e-6)
    pipeline = Pipeline([("scale", StandardScaler()), ("probe", OneVsRestClassifier(one) if data.is_multi else one)])
    grid = {f"probe__{'estimator__' * data.is_multi}C": STRENGTHS}  # of equals the first is taken
    scoring = "average_precision" if data.is_multi else "accuracy"
    search = GridSearchCV(pipeline, grid, scoring=scoring, cv=[*inner][: 1 if len(of) > MANY else None])
    with warnings.catch_warnings(action="ignore"):  # of classes an inner fold lacks, and fits that took 1000 steps
        search.fit(data.vectors[trained].astype(float), of_class if data.is_multi else of_class.argmax(axis=1))
    found = np.zeros(data.of_class.shape)
    columns = np.arange(len(data.classes)) if data.is_multi else search.classes_
    np.add.at(found, (data.file_of[tested][:, None], columns), search.predict_proba(data.vectors[tested].astype(float)))
    value, classes = _score(data, found / np.bincount(data.file_of)[:, None], is_test)
    chance, _ = _score(data, np.broadcast_to(data.of_class[is_train].mean(axis=0), found.shape), is_test)
    told = {"fold": fold, "C": search.best_params_.popitem()[1], "files": int(is_test.sum())}
    return {**told, "value": value, "chance": chance, "classes": classes}


def _stratified(of_class: Mask, file_of: Rows, number: int) -> list[tuple[Rows, Rows]]:
    """Rows to train on and to hold out, in at most `number` folds, by their classes, the rarest where a row has several."""
    strata = np.where(of_class, of_class.sum(axis=0), len(of_class) + 1).argmin(axis=1)
    if (most := max(len({*file_of[strata == each].tolist()}) for each in {*strata.tolist()})) < 2:
        raise UserError("no class has two files: expected some to learn from and others to test on")
    with warnings.catch_warnings(action="ignore"):  # of classes with fewer files than folds
        return [*StratifiedGroupKFold(min(number, most), shuffle=True, random_state=0).split(strata, strata, file_of)]


def _score(data: Labelled, found: NDArray[np.float64], is_test: Mask) -> tuple[float, dict[str, tuple[int, float]]]:
    """Of probabilities (N, K): accuracy or mean average precision, and that of each class that the test has."""
    of_class, found, classes = data.of_class[is_test], found[is_test], {}
    is_right = of_class[np.arange(len(found)), found.argmax(axis=1)]
    for name, is_of, asked in zip(data.classes, of_class.T, found.T, strict=True):
        if is_of.any():
            own = average_precision_score(is_of, asked) if data.is_multi else is_right[is_of].mean()
            classes[name] = int(is_of.sum()), float(own)
    return float(np.mean([own for _, own in classes.values()] if data.is_multi else is_right)), classes
