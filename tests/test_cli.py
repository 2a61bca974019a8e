"""Test `clap-ds`: its commands, their help, and what an unknown command or option is answered."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds import cli, presets, shards
from clap_ds.config.arguments import CommandParser, make_parser
from clap_ds.config.model_names import preset_names
from clap_ds.utils.paths import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
SUBCOMMANDS = [f"shards {name}" for name in shards.MODULES] + ["sweep status", "sweep resume"]
COMMANDS = [*cli.MODULES, *SUBCOMMANDS]
METAVAR = r"(-- )?[A-Z][A-Z_.,=…-]*"


@pytest.fixture(autouse=True)
def _keep_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])


def helped(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser that prints the help of a command."""
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(CommandParser, "print_help", lambda self, file=None: parsers.append(self))
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    (parser,) = parsers
    return parser


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_description_and_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = helped(command, monkeypatch)
    assert parser.prog == f"clap-ds {command}"
    assert (parser.description or "").endswith(".")
    assert re.search(
        rf"^    .*\b({command.split()[0]}\b|{command}\.py)", parser.epilog or "", re.MULTILINE
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_default_and_value(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = helped(command, monkeypatch)
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        assert action.help, action.dest
        takes_a_value = action.nargs != 0
        if takes_a_value and not action.choices:
            assert re.fullmatch(METAVAR, str(action.metavar)), f"{action.dest}: {action.metavar}"
        if (
            takes_a_value
            and action.option_strings
            and action.default not in (None, [], argparse.SUPPRESS)
        ):
            assert "(default: " in formatter._expand_help(action), action.dest


@pytest.mark.parametrize(
    "command", ["bench", "train", "plan", "flops", "evaluate", "submit", "sweep"]
)
def test_a_run_is_given_by_the_same_option_everywhere(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (action,) = (
        action for action in helped(command, monkeypatch)._actions if action.dest == "config"
    )
    assert {"--config", "--deepspeed_config"} <= {*action.option_strings}


def test_commands_and_options_that_pages_name_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "analysis/FLOPS.md")),
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = re.findall(
        r"(?:`|\$ |do |gpus-per-node=\d )clap-ds ((?:shards|sweep) [a-z]+|[a-z]+)\b([^`\n|;#]*)",
        text,
    )
    assert len(found) > 50
    options: dict[str, set[str]] = {}
    for command, line in found:
        assert command in COMMANDS, f"clap-ds {command}{line}"
        if command not in options:
            options[command] = {
                name
                for action in helped(command, monkeypatch)._actions
                for name in action.option_strings
            }
        named = re.findall(r"(?<= )--\w+", line.partition(" -- ")[0])
        assert {*named} <= options[command], f"clap-ds {command}{line}"
    by_path = r"(python3?|-m) (-m )?(analysis|clap_ds)[/.](?!model|config|launch|distributed)"
    assert not re.search(by_path, text)


def test_commands_are_imported_only_if_they_are_chosen() -> None:
    """In a new process: this one has imported everything."""
    program = """
import contextlib, io, sys
from clap_ds import cli

def check(name, unwanted):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
    imported = [module for module in unwanted if module in sys.modules]
    assert not imported, (name, imported)

heavy = ["torch", "transformers", "deepspeed", "matplotlib"]
for name in ("--help", "hostfile", "preflight", "submit", "sweep"):
    check(name, ["numpy", "pydantic", *heavy])
for name in cli.MODULES:
    check(name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_overview_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in cli.MODULES)
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("scalin x", "did you mean 'scaling'"),
        ("flops --contxt_length 5", "did you mean '--context_length'"),
        ("shards size", "choose from"),
        ("shards prepare . x --kind mel --preset micro", "a folder"),
    ],
)
def test_unknown_words_are_answered_with_the_nearest(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_options_with_dashes_equal_those_with_underscores() -> None:
    parser = make_parser("Do something.")
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("--find_micro_batch", action="store_true")
    parser.add_argument("more", nargs="*")
    words = ["--micro-batch=3", "--find-micro-batch", "--", "a-b", "--micro-batch"]
    assert vars(parser.parse_args(words)) == {
        "micro_batch": 3, "find_micro_batch": True, "more": ["a-b", "--micro-batch"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/somewhere/bin/clap-ds", "submit", "x"], "clap-ds submit"),
        ([str(ROOT / "clap_ds" / "__main__.py"), "submit"], "clap-ds submit"),
    ],
)
def test_help_names_the_command_as_it_was_called(
    argv: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert make_parser("Do.").prog == name


@pytest.mark.parametrize(
    "file",
    ["launch/submit.py", "launch/slurm_hostfile.py", "analysis/scaling.py", "clap_ds/bench.py"],
)
def test_files_run_by_path(file: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file, "--help"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.startswith(f"usage: {file} ")) == (0, True), done.stderr


def test_presets_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    assert {*presets.PRESETS} == {*preset_names()}
    assert {*presets.CONFIGURATIONS} == {path.stem for path in CONFIGS.glob("*.json")}
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*presets.PRESETS, *presets.CONFIGURATIONS))
