"""Copies of the gradient follow from the number of clips."""

import json
from pathlib import Path

from benchmarks.specaugment import main


def test_each_write_of_the_loop_copies_the_batchs_gradient(tmp_path: Path) -> None:
    main(["--clips", "2", "3", "--rounds", "1", "--output", str(tmp_path / "t.md")])
    rows = json.loads((tmp_path / "t.json").read_text())
    found = [(row["clips"], row["way"], row["copies"]) for row in rows]
    assert found == [(2, "in a loop", 9), (2, "once", 0), (3, "in a loop", 13), (3, "once", 0)]
    assert rows[2]["gb"] == 2 * 13 * 3 * 1001 * 64 * 4 / 1e9
    assert "| in a loop | 13 |" in " ".join((tmp_path / "t.md").read_text().split())
