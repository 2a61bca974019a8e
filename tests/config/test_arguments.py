"""`--set` and the fields that it changes in a run's JSON."""

import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds.config.arguments import parse_assignment, parse_varied
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_assignment_value_is_json_or_text():
    assert parse_assignment("a.b=1e-4") == ("a.b", 1e-4)
    assert parse_assignment("a=text") == ("a", "text")
    assert parse_varied("a.b=1e-4,3,off") == ("a.b", [1e-4, 3, "off"])
    assert parse_varied('a=[],["x","y"]') == ("a", [[], ["x", "y"]])


def test_run_with_assignments_has_their_values(write_run):
    file = write_run()
    changes = ["clap.bench.windows=3", "optimizer.params.lr=1e-5", "clap.output.run_name=other"]
    run = load_run(file, 1, changes)
    assert run.clap.bench.windows == 3
    assert run.resolved()["optimizer"]["params"]["lr"] == 1e-5
    assert run.run_name == "other"
    reseeded = load_run(file, 1, [*changes, "clap.seed=1"])
    assert reseeded.checkpoint_folder != run.checkpoint_folder


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "clap.bench.widows=3",
            "clap.bench.widows: no such field; did you mean 'clap.bench.windows'",
        ),
        ('clap.bench={"widows": 3}', "clap.bench.widows: "),
        ("clap.seed.x=1", "clap.seed.x: clap.seed is 0, not an object"),
        ("clap.bench.windows", ".*expected NAME=VALUE"),
        ("clap..windows=1", ".*expected NAME=VALUE"),
    ],
)
def test_wrong_assignment_is_named_instead_of_the_file(write_run, assignment, message):
    with pytest.raises(UserError, match=f"^--set {message}"):
        load_run(write_run(clap={"seed": 0}), 1, [assignment])


def test_wrong_field_of_the_file_is_named_with_file_despite_assignments(write_run):
    file = write_run(gradient_clappin=1)
    with pytest.raises(UserError, match=f"^{file}: gradient_clappin: "):
        load_run(file, 1, ["clap.bench.windows=3"])


@pytest.mark.parametrize(
    "command", ["bench", "train", "flops", "plan --gpu h100-sxm", "evaluate nothing"]
)
def test_command_takes_assignments(command, write_run):
    options = ["--config", str(write_run()), "--set", "clap.bench.widows=3"]
    argv = [sys.executable, "-m", "clap_ds", *command.split(), *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set clap.bench.widows: no such field")
