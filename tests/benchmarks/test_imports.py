"""What a rank imports before its first step, counted by the command itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.imports import by_package
from tests.training.training_commands import ROOT, environment, write_training

LATE = {
    "transformers", "tokenizers", "huggingface_hub", "httpx2", "scipy", "PIL", "jinja2", "pandas", "matplotlib", "setuptools",
}  # fmt: skip


def test_files_count_once_by_whatever_names(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "a" / "b"
    folder.mkdir(parents=True)
    for path, size in {
        folder / "x.py": 3_000_000,
        folder / "../y.py": 1_000_000,
        tmp_path / "own.py": 2_000_000,
    }.items():
        path.write_bytes(bytes(size))
    (tmp_path / "link.py").symlink_to(tmp_path / "own.py")
    names = (
        "site-packages/a/b/x.py",
        "site-packages/a/b/../b/x.py",
        "site-packages/a/y.py",
        "link.py",
        "own.py",
        "none",
    )
    found = by_package(str(tmp_path / name) for name in (*names, "site-packages"))
    by_name = {row["package"]: (row["files"], row["mb"]) for row in found}
    assert by_name == {"all": (3, 6.0), "a": (2, 4.0), "": (1, 2.0)}


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_run_imports_nothing_it_has_no_use_for(tmp_path: Path, command: str) -> None:
    config = write_training(tmp_path, clap={"train": {"samples": 8}})
    words = [f"clap_ds/{command}.py", "--deepspeed_config", config, "--output", tmp_path / "imports.md"]
    subprocess.run([sys.executable, "-m", "benchmarks.imports", *words], cwd=ROOT, env=environment(), check=True)
    found = {row["package"]: row["files"] for row in json.loads((tmp_path / "imports.json").read_text())}
    assert min(found["torch"], found["deepspeed"]) > 100
    assert not LATE & found.keys()
