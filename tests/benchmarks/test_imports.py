"""What a rank imports before its first step, counted by the command itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.imports import by_package
from tests.conftest import micro_run
from tests.training.training_commands import ROOT, environment, write_training

LATE = {
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "sympy",
    "scipy",
    "triton",
    "setuptools",
    "pandas",
    "matplotlib",
}
"""Packages that a run of synthetic data on CPUs has no use for."""


def test_files_count_once_whatever_they_are_called_and_how_often(tmp_path: Path) -> None:
    for name, size in (("a/x.py", 3_000_000), ("a/b/y.py", 1_000_000), ("c.py", 500_000)):
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "own.py").write_bytes(bytes(2_000_000))
    (tmp_path / "link.py").symlink_to(tmp_path / "own.py")
    names = (
        "site-packages/a/x.py",
        "site-packages/a/b/../x.py",
        "site-packages/a/b/y.py",
        "site-packages/c.py",
        "own.py",
    )
    found = by_package([*(str(tmp_path / name) for name in (*names, "link.py", "none.py", "site-packages"))])
    assert {row["package"]: (row["files"], row["mb"]) for row in found} == {
        "all": (4, 6.5), "a": (2, 4.0), "c.py": (1, 0.5), "": (1, 2.0),
    }  # fmt: skip


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_run_imports_nothing_it_has_no_use_for(tmp_path: Path, command: str) -> None:
    if command == "bench":
        config = tmp_path / "run.json"
        config.write_text(json.dumps(micro_run(clap={"output": {"root": str(tmp_path)}})))
    else:
        config = write_training(tmp_path, clap={"train": {"samples": 8}})
    words = [f"clap_ds/{command}.py", "--deepspeed_config", config, "--output", tmp_path / "imports.md"]
    subprocess.run([sys.executable, "-m", "benchmarks.imports", *words], cwd=ROOT, env=environment(), check=True)
    found = {row["package"]: row["files"] for row in json.loads((tmp_path / "imports.json").read_text())}
    assert min(found["torch"], found["deepspeed"]) > 100
    assert not LATE & found.keys()
