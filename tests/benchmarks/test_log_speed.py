"""What the benchmark of log reading writes is what DeepSpeed prints, and its figures are of the whole log."""

import gzip
from pathlib import Path

import pytest

from benchmarks.log_speed import KINDS, read, write_log
from clap_ds.analysis.log_scan import scan_log


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_log_is_of_use(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.log"
    with gzip.open(path, "wb") if "gzip" in kind else path.open("wb") as file:
        write_log(file, kind, 1e5)
    scan = scan_log(path)
    (attempt,) = scan.starts
    last_step = int(attempt.positions[-1])
    assert (last_step % 1000, len(attempt.positions)) == (2, last_step - 2)
    assert scan.left_out == (3 * (last_step - 2) if kind == "four ranks" else 0)
    assert read(str(path))["gb"] == scan.num_bytes / 1e9 > 1e-4
