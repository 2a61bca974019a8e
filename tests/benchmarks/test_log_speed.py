"""What the benchmark of log reading writes is what DeepSpeed prints, and its figures are of the whole log."""

import gzip
from pathlib import Path

import pytest

from benchmarks.log_speed import KINDS, read, write_log
from clap_ds.analysis.deepspeed_log import scan_log


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_log_is_of_use(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.log"
    with gzip.open(path, "wb") if "gzip" in kind else path.open("wb") as file:
        write_log(file, kind, 1e5)
    scan = scan_log(path)
    (attempt,) = scan.attempts
    assert (scan.damaged, scan.unusable, attempt.last_step % 1000) == (0, 0, 2)
    assert scan.repeated == (3 * (attempt.last_step - 2) if kind == "four ranks" else 0)
    assert bool(attempt.breakdown_steps) == (kind == "with the breakdown")
    assert read(str(path))["gb"] == scan.file.num_bytes / 1e9 > 1e-4
