"""Ranks that are light processes meet, and the one that is stopped is found."""

import json
from pathlib import Path

from tests import processes


def test_a_row_for_each_number_of_ranks(tmp_path: Path) -> None:
    output = tmp_path / "scale.md"
    processes.run(["-m", "benchmarks.ranks_scale", "--ranks", "2", "3", "--output", output], check=True)
    rows = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [2, 3]
    assert all(row["met_s"] >= row["started_s"] > 0 for row in rows)
    assert [row["hostfile_kb"] for row in rows] == [0.028, 0.042]
