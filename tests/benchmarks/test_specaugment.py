"""Copies of the gradient follow from the number of clips."""

import json
from pathlib import Path

from benchmarks.specaugment import main


def test_each_write_of_the_loop_copies_the_batchs_gradient(tmp_path: Path) -> None:
    main(["--clips", "2", "3", "--rounds", "1", "--output", str(tmp_path / "t.md")])
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [(row["loop"]["copies"], row["mask"]["copies"]) for row in rows] == [(9, 0), (13, 0)]
    assert rows[1]["loop"]["gb"] == 2 * 13 * 3 * 1001 * 64 * 4 / 1e9
    assert "| 13 |" in " ".join((tmp_path / "t.md").read_text().split())
