"""A linear probe against scikit-learn's parts put together anew, and on data whose answer is known."""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from clap_ds import probe
from clap_ds.config.errors import UserError
from clap_ds.inference import probing
from clap_ds.inference.vectors import About, Block, write_table

RANDOM = np.random.default_rng(0)
ABOUT = About("runs/mine", "ab", 16, "each", 0.0, "fp32", None, None, "0")
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Writes a table of files and vectors and lists of rows, and gives what the command's --json has."""
    monkeypatch.chdir(tmp_path)

    def probed(files: Sequence[str], vectors: NDArray[Any], options: str = "", **lists: Sequence[Sequence[str]]) -> Any:
        block = Block(np.array(files), *np.zeros((2, len(files))), np.array([""] * len(files)), vectors.astype("f4"))
        with Path("v.npz").open("wb") as file:
            write_table(file, ".npz", ABOUT, [block])
        for name, rows in lists.items():
            with Path(f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("filename", "label", "fold"), *rows])
        words = "" if "list_column" in options else "--label_column label "
        probe.main(f"v.npz --labels {'.csv '.join(lists)}.csv --json out.json {words}{options}".split())
        return json.loads(Path("out.json").read_text())

    return probed


def clips(number: int, classes: int, noise: float) -> tuple[list[str], NDArray[Any], list[tuple[str, str, str]]]:
    """Files, vectors about a centre for each class, and rows of a list, class by class in four folds."""
    files, kind = [f"{n}.wav" for n in range(number)], np.arange(number) % classes
    vectors = 3 * np.eye(classes, 16)[kind] + noise * RANDOM.normal(size=(number, 16))
    return files, vectors, [(file, f"c{k}", str(n // classes % 4)) for n, (file, k) in enumerate(zip(files, kind))]  # noqa: B905


def standardised(vectors: NDArray[Any], train: NDArray[Any]) -> NDArray[Any]:
    vectors = vectors.astype("f4").astype(float)
    return (vectors - vectors[train].mean(0)) / vectors[train].std(0)


def test_what_can_be_told_is_told_and_noise_is_chance(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    files, vectors, rows = clips(96, 3, 0.01)
    said = run(files, vectors, "--fold_column fold", a=rows)
    assert (said["mean"], said["standard_deviation"], said["chance"]) == (1, 0, pytest.approx(1 / 3))
    assert capsys.readouterr().out.splitlines()[-2] == "100.00% ± 0.00% over folds, chance 33.33%"
    assert [each["files"] for each in said["folds"]] == [24] * 4
    noise = run(files, RANDOM.normal(size=(96, 16)), "--folds 6", a=[(*row[:2], "") for row in rows])
    assert abs(noise["mean"] - 1 / 3) < 4 * np.sqrt(2 / 9 / 96)  # four times a binomial's deviation
    assert [each["files"] for each in noise["folds"]] == [16] * 6


def test_the_choice_is_gridsearchs_on_training_folds_alone(run: Run) -> None:
    files, vectors, rows = clips(120, 3, 2.5)
    kind, fold = (np.array([row[column] for row in rows]) for column in (1, 2))
    said = run(files, vectors, "--fold_column fold", a=rows)
    for each in said["folds"]:
        train, scores = fold != each["fold"], {}
        for strength in probing.STRENGTHS:
            right = []
            for inner in {*fold[train]}:
                fit, held = train & (fold != inner), fold == inner
                x = standardised(vectors, fit)
                model = LogisticRegression(C=strength, max_iter=1000, tol=1e-6).fit(x[fit], kind[fit])
                right.append(model.score(x[held], kind[held]))
            scores[strength] = round(np.mean(right), 9)
        x, best = standardised(vectors, train), max(scores, key=scores.__getitem__)
        model = LogisticRegression(C=best, max_iter=1000, tol=1e-6).fit(x[train], kind[train])
        assert (each["C"], each["value"]) == (best, pytest.approx(model.score(x[~train], kind[~train])))
    assert len({each["C"] for each in said["folds"]}) > 1, "or the comparison would say little"
    assert 0.5 < said["mean"] < 0.95
    # A test fold's labels and vectors have no part in the choice.
    other = [(row[0], row[1] if row[2] != "0" else f"c{n % 3}", row[2]) for n, row in enumerate(reversed(rows))]
    changed = np.where(fold[:, None] == "0", -vectors, vectors)
    assert run(files, changed, "--fold_column fold", a=other)["folds"][0]["C"] == said["folds"][0]["C"]


def test_windows_of_a_file_stay_together_and_share_its_score(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files, vectors, rows = clips(60, 2, 4)
    parts: list[Any] = []

    def recording(*arguments: Any, cv: Any, **more: Any) -> Any:
        parts.extend(cv)
        return GridSearchCV(*arguments, cv=cv, **more)

    monkeypatch.setattr(probing, "GridSearchCV", recording)
    windows = np.repeat(vectors, 3, axis=0) + RANDOM.normal(size=(180, 16))
    wanted = "--fold_column fold --test_folds 1 2 --train_folds 0"
    said = run(np.repeat(files, 3).tolist(), windows, wanted, a=rows)
    kind, fold = (np.repeat([row[column] for row in rows], 3) for column in (1, 2))
    of = np.repeat(np.arange(60), 3)[fold == "0"]
    assert len(parts) == 5
    assert all({*of[fit]}.isdisjoint(of[held]) for fit, held in parts)
    train, test = fold == "0", np.isin(fold, ["1", "2"])
    x = standardised(windows, train)
    model = LogisticRegression(C=said["folds"][0]["C"], max_iter=1000, tol=1e-6).fit(x[train], kind[train])
    shares = model.predict_proba(x[test]).reshape(-1, 3, 2).mean(1)
    assert said["mean"] == pytest.approx((model.classes_[shares.argmax(1)] == kind[test][::3]).mean())
    assert said["mean"] != pytest.approx(model.score(x[test], kind[test]))
    assert (said["folds"][0]["files"], said["standard_deviation"]) == (30, None)


def test_several_classes_a_file(run: Run) -> None:
    files, vectors = [f"on/{n}.flac" for n in range(80)], RANDOM.normal(size=(80, 16))
    of = np.stack([vectors[:, 0] > 0, vectors[:, 1] + RANDOM.normal(size=80) > 0.5, vectors[:, 0] < 1], 1)
    rows = [(f"{n}.wav", "; ".join(np.array(["a", "b", "c"])[each]), "") for n, each in enumerate(of)]
    said = run(files, vectors, "--list_column label --test_folds test", train=rows[:50], test=rows[50:])
    has_label = of.any(1)
    train, test = has_label & (np.arange(80) < 50), has_label & (np.arange(80) >= 50)
    x, precisions = standardised(vectors, train), {}
    for name, is_of in zip("abc", of.T, strict=True):
        model = LogisticRegression(C=said["folds"][0]["C"], max_iter=1000, tol=1e-6).fit(x[train], is_of[train])
        hits = is_of[test][np.argsort(-model.predict_proba(x[test])[:, 1])]
        precisions[name] = (hits.cumsum() / np.arange(1, len(hits) + 1))[hits].mean()
    assert said["classes"] == pytest.approx(precisions)
    assert said["mean"] == pytest.approx(np.mean([*precisions.values()]))
    assert said["chance"] == pytest.approx(of[test].mean())
    assert 0.6 < said["mean"] < 1


def test_names_match_from_their_ends_and_what_is_left_out_is_named(run: Run) -> None:
    files, vectors, rows = clips(24, 2, 1)
    vectors[3] = np.nan
    there = [f"/d/ESC/fold{row[2]}/ü {file}" for file, row in zip(files, rows, strict=True)]
    there[5] = f"s/t-0.tar: {there[5].removesuffix('.wav')}"
    listed = [(f"ESC\\fold{row[2]}\\u\u0308 {row[0][:-4]}.mp3", *row[1:]) for row in rows]
    listed[4], listed[7] = ("gone.wav", "c0", "0"), (listed[7][0], " ", "1")
    said = run(there, vectors, "--fold_column fold", a=listed)
    assert said["files"] == 21
    assert [*said["left_out"].values()] == [["gone.wav"], [listed[7][0]], [there[3]], [there[4], there[7]]]


def test_mistakes_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files, vectors, rows = clips(24, 2, 1)
    by_fold = "--fold_column fold"
    for message, options, table, listed in (
        (r"a.csv: no column 'folds'; did you mean 'fold'\?; say which by --fold_column", "--fold_column folds", files, rows),
        (r"a.csv:2: '0.wav' may be 'x/0.wav' or 'y/0.wav'", by_fold, ["x/0.wav", "y/0.wav", *files[2:]], rows),
        (r"a.csv:26: '0.wav' is '0.wav', \['c1'\], fold '0'; elsewhere", by_fold, files, [*rows, ("0.wav", "c1", "0")]),
        (r"no file with a vector .* 24 rows aren't in the table, such as '0.wav'", by_fold, ["a"] * 24, rows),
        (r"no file is of fold 'dev'; there are 0, 1, 2, 3", by_fold + " --test_folds dev", files, rows),
        (r"fold 3: only its files are of 'new'", by_fold, files, [*rows[:-1], (files[23], "new", "3")][:24]),
        (r"fold 0: what is left to train on has 1 classes", by_fold, files[:2], [("0.wav", "a", "0"), ("1.wav", "b", "1")]),
        (r"no class has two files", "", files, [(file, file, "") for file in files]),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            run(table, vectors[: len(table)], options, a=listed)
    with pytest.raises(UserError, match=r"--json absent/out.json: expected a file in a folder that can be written"):
        run(files, vectors, " --json absent/out.json", a=rows)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"needs scikit-learn: pip install 'clap-ds\[probe\]'"):
        run(files, vectors, a=rows)
