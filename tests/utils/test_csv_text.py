"""Cells of CSV files."""

import pytest

from clap_ds.utils.csv_text import guard_formula, unguard_formula, write_csv


@pytest.mark.parametrize("cell", ["=1+1", "-2+3", "\t=1", "-", "'=1"])
def test_cell_with_formula_gets_apostrophe_and_loses_it_when_read(cell):
    assert guard_formula(cell) == f"'{cell}"
    assert unguard_formula(f"'{cell}") == cell


def test_csv_file_has_numbers_guarded_text_and_empty_cells_for_nan(tmp_path):
    write_csv(tmp_path / "t.csv", [("=a.wav", "-0.25", "+1e-3", "a=b", "'=1", -1.5, float("nan"))])
    assert (tmp_path / "t.csv").read_text() == "'=a.wav,-0.25,+1e-3,a=b,''=1,-1.5,\n"
