"""Copies of a run's JSON with other values."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clap_ds.config.arguments import parse_assignment, parse_varied, with_field
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_fields_by_dotted_names() -> None:
    assert with_field({"a": {"b": 1, "c": 2}}, "a.b", 3) == {"a": {"b": 3, "c": 2}}
    assert with_field({}, "a.b.c", 3) == {"a": {"b": {"c": 3}}}
    with pytest.raises(UserError, match="not an object"):
        with_field({"a": 1}, "a.b", 3)
    assert parse_assignment("a.b=1e-4") == ("a.b", 1e-4)
    assert parse_assignment("a=text") == ("a", "text")
    assert parse_varied("a.b=1e-4,3,off") == ("a.b", [1e-4, 3, "off"])
    assert parse_varied('a=[],["x","y"]') == ("a", [[], ["x", "y"]])
    for wrong in ("a", "=1", "a..b=1"):
        with pytest.raises(UserError, match="expected NAME=VALUE"):
            parse_assignment(wrong)


def test_assignments_are_part_of_the_run(write_run: Callable[..., Path]) -> None:
    changes = [
        "clap.bench.windows=3",
        "optimizer.params.lr=1e-5",
        "clap.output.run_name=other",
        "clap.seed=1",
    ]
    file = write_run()
    run = load_run(file, 1, changes)
    resolved = run.resolved()
    assert (resolved["clap"]["bench"]["windows"], resolved["optimizer"]["params"]["lr"]) == (
        3,
        1e-5,
    )
    assert run.run_name == "other"
    assert run.checkpoint_folder != load_run(file, 1, changes[:-1]).checkpoint_folder


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "clap.bench.widows=3",
            "--set clap.bench.widows: no such field; did you mean 'clap.bench.windows'",
        ),
        ("clap.bench.windows=many", '--set clap.bench.windows: .*found "many"'),
        ("clap.bench=3", "--set clap.bench: "),
        ('clap.bench={"widows": 3}', "--set clap.bench.widows: "),
        (
            "gradient_clippin=1",
            "--set gradient_clippin: no such field; did you mean 'gradient_clipping'",
        ),
        ("optimizer.params.rl=1", "--set optimizer.params.rl: "),
        ("clap.seed.x=1", "--set clap.seed.x: clap.seed is 0, not an object"),
        ("clap.bench.windows", "--set .*expected NAME=VALUE"),
    ],
)
def test_a_wrong_assignment_is_named_and_not_the_file(
    write_run: Callable[..., Path], assignment: str, message: str
) -> None:
    file = write_run(clap={"seed": 0})
    with pytest.raises(UserError, match=f"^{message}"):
        load_run(file, 1, [assignment])
    file.write_text(file.read_text().replace("gradient_clipping", "gradient_clappin"))
    with pytest.raises(UserError, match=f"{file}: gradient_clappin: "):
        load_run(file, 1, ["clap.bench.windows=3"])


@pytest.mark.parametrize(
    "command", ["bench", "train", "flops", "plan --gpu h100-sxm", "evaluate nothing"]
)
def test_commands_take_assignments(command: str, write_run: Callable[..., Path]) -> None:
    words = [*command.split(), "--config", str(write_run()), "--set", "clap.bench.widows=3"]
    done = subprocess.run(
        [sys.executable, "-m", "clap_ds", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set clap.bench.widows: no such field")
