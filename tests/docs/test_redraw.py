"""Committed pictures show their records as today's code draws them."""

from pathlib import Path

import pytest
import redraw
from redraw import FORMATS, LIST, ROOT, compute_digest, find_stale_pictures

from clap_ds.utils.files import read_json


def test_committed_pictures_are_of_todays_records_and_code() -> None:
    assert find_stale_pictures() == {}, "run: make pictures"


def test_committed_pictures_are_all_in_the_list() -> None:
    listed = {Path(name).with_suffix("") for name in read_json(LIST)}
    folders = ("docs", "results", "analysis")
    committed = {
        file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.*")
    }
    assert {file.with_suffix("") for file in committed if file.suffix in FORMATS} == listed


@pytest.mark.parametrize(
    "changed", ["record.json", "record.md", "analysis/drawer.py", "analysis/style.py"]
)
def test_a_changed_record_or_module_changes_the_digest(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redraw, "ROOT", tmp_path)
    (tmp_path / "analysis").mkdir()
    for name in (
        "record.json",
        "record.md",
        "record.png",
        "analysis/style.py",
        "analysis/other.py",
    ):
        (tmp_path / name).write_text("1")
    (tmp_path / "analysis" / "drawer.py").write_text("from clap_ds.analysis.style import COLORS")
    command = "analysis/drawer.py record.json"
    before = compute_digest(command)
    for name in ("record.png", "analysis/other.py"):
        (tmp_path / name).write_text("2")
    assert compute_digest(command) == before
    (tmp_path / changed).write_text("2")
    assert compute_digest(command) != before
