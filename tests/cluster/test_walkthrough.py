"""Run the walk-through of docs/scaling_study.md on a real SLURM and compare its output with the page.

The folder's name has a space. The cluster profile is the test cluster's, and the model is smaller.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import write_profile
from tests.conftest import ROOT, micro_run

pytestmark = pytest.mark.end_to_end
PAGE = (ROOT / "docs" / "scaling_study.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## From clone to scaling plot\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```console\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
BY_HAND = r"git clone .*|make setup.*"  # already done by the tests


def _commands() -> list[tuple[str, list[str]]]:
    """Return each command with the output that the page shows."""
    commands: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCKS).splitlines():
        if line.startswith("$ "):
            command = re.split(r"\s{2,}#", line)[0].removeprefix("$ ")
            commands.append((command, []))
        else:
            _, output_lines = commands[-1]
            output_lines.append(line)
    return commands


def _pattern(line: str) -> str:
    """Convert a line to a regular expression: `…` matches anything, a number any number, spaces any
    space, and GPUs CPU ranks."""
    parts = (
        r"\s+".join(map(re.escape, part.split(" "))).replace("GPU", "(?:GPU|rank)")
        for part in re.sub(" +", " ", line.strip()).split("…")
    )
    return re.sub(r"\d+(?:(?:\\?[.,:])\d+)*", lambda _: r"[\d.,:]+", ".*".join(parts))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "my work" / "clap-ds"
    left_out = shutil.ignore_patterns(
        ".*", "runs", "wheelhouse", "build", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    (folder / "ds_configs" / "htsat_tiny.json").write_text(json.dumps(micro_run()))
    return folder


def test_every_line_prints_the_output_of_the_page(cluster, checkout):
    cluster.wait_until_idle()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = ["env", f"PATH={path}", f"PYTHONPATH={checkout}"]
    for command, expected_lines in _commands():
        if re.fullmatch(BY_HAND, command):
            continue
        shell = ["bash", "-c", command.replace("…", "*")]
        done = cluster.run("ctl", *environment, *shell, folder=checkout, check=False, timeout=240)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"$ {command}\n{output}"
        lines = iter(output.splitlines())  # in the page's order
        for expected in expected_lines:
            pattern = re.compile(rf"\s*{_pattern(expected)}\s*")
            assert any(map(pattern.fullmatch, lines)), f"{expected!r} isn't in:\n{output}"
        if command.startswith("cp "):
            profile = checkout / "launch" / "clusters" / "mine.json"
            shutil.copy(write_profile(checkout.parent, run_root="runs"), profile)
        # The page continues after the jobs have ended.
        is_empty = lambda: not cluster.run("ctl", "squeue", "-h").stdout.strip()  # noqa: E731
        cluster.wait_until(is_empty, 240, "an empty queue")
    (picture,) = checkout.glob("*.png")
    assert picture.stat().st_size > 10_000
