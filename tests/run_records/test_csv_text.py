"""Cells of CSV files."""

import csv
from pathlib import Path

import pytest

from clap_ds.run_records.csv_text import guard_formula, unguarded, write_csv


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "- a dog"])
def test_text_that_a_spreadsheet_would_compute_gets_an_apostrophe(cell: str) -> None:
    assert guard_formula(cell) == f"'{cell}"
    assert unguarded(f"'{cell}") == cell


@pytest.mark.parametrize("cell", ["-0.25", "+1e-3", "", "a=b", "'=1", "a dog", -1.5, 3])
def test_numbers_and_other_text_stay(cell: str | float) -> None:
    assert guard_formula(cell) == cell


def test_a_file_has_numbers_guarded_text_and_gaps(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [("path", "score"), ("=a.wav", -0.5), ("b,c", float("nan"))])
    with (tmp_path / "t.csv").open() as file:
        assert [*csv.reader(file)] == [["path", "score"], ["'=a.wav", "-0.5"], ["b,c", ""]]
