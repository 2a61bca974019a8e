"""Committed pictures show their records as today's code draws them."""

from pathlib import Path

import pytest
import redraw
from redraw import FORMATS, LIST, ROOT, compute_digest, find_stale_pictures

from clap_ds.utils.files import read_json


def test_committed_pictures_are_of_current_records_and_code():
    assert find_stale_pictures() == {}, "run: make pictures"


def test_committed_pictures_are_all_in_the_list():
    listed = {Path(name).with_suffix("") for name in read_json(LIST)}
    committed = set()
    for folder in ("docs", "results", "analysis"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in FORMATS:
                committed.add(file.relative_to(ROOT).with_suffix(""))
    assert committed == listed


@pytest.mark.parametrize(
    ("file", "is_stale"),
    [
        ("record.md", True),
        ("analysis/drawer.py", True),
        ("analysis/style.py", True),
        ("analysis/unrelated.py", False),
    ],
)
def test_digest_changes_with_records_and_drawing_code(file, is_stale, tmp_path, monkeypatch):
    monkeypatch.setattr(redraw, "ROOT", tmp_path)
    (tmp_path / "analysis").mkdir()
    for name in ("record.json", "record.md", "analysis/style.py", "analysis/unrelated.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / "analysis" / "drawer.py").write_text("from clap_ds.analysis.style import COLORS")
    command = "analysis/drawer.py record.json"
    digest = compute_digest(command)
    (tmp_path / file).write_text("2")
    assert (compute_digest(command) != digest) == is_stale
