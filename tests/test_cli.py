"""`clap-ds`: its commands, their help and pages, and messages about unknown commands and options."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds import cli, shards
from clap_ds.config.arguments import CommandParser, make_parser
from clap_ds.config.model import load_preset
from clap_ds.config.model_names import list_presets
from clap_ds.flop_count.analytic import TextLengths, forward_flops
from clap_ds.presets import CONFIGURATIONS, PRESETS
from clap_ds.utils.paths import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
SUBCOMMANDS = [f"shards {name}" for name in shards.MODULES] + ["sweep status", "sweep resume"]
COMMANDS = [*cli.MODULES, *SUBCOMMANDS]


@pytest.fixture(autouse=True)
def _keep_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])


def find_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser that prints the help of a command."""
    parsers: list[argparse.ArgumentParser] = []
    with pytest.MonkeyPatch.context() as patch:
        print_help = lambda self, file=None: parsers.append(self)  # noqa: E731
        patch.setattr(CommandParser, "print_help", print_help)
        with pytest.raises(SystemExit, match="0"):
            cli.main([*command.split(), "--help"])
    (parser,) = parsers
    return parser


@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_has_example_and_describes_every_option(command):
    parser = find_parser(command)
    assert parser.prog == f"clap-ds {command}"
    assert (parser.description or "").endswith(".")
    example = rf"^    .*\b({command.split()[0]}\b|{command}\.py)"
    assert re.search(example, parser.epilog or "", re.MULTILINE)
    formatter = parser._get_formatter()
    for action in parser._actions:
        assert action.help, action.dest
        has_value = action.help != argparse.SUPPRESS and action.nargs != 0
        has_default = action.default not in (None, [], argparse.SUPPRESS)
        if has_value and has_default and action.option_strings:
            assert "(default: " in formatter._expand_help(action), action.dest


def test_pages_name_existing_commands_and_options():
    names = ("README.md", "CONTRIBUTING.md", "analysis/FLOPS.md")
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in names)]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    # in code, in consoles, in loops
    start = r"(?:`|\$ |do |gpus-per-node=\d )clap-ds "
    calls = re.findall(rf"{start}((?:shards|sweep) [a-z]+|[a-z]+)\b([^`\n|;#]*)", text)
    assert len(calls) > 50
    options = {command: find_parser(command)._option_string_actions.keys() for command in COMMANDS}
    for command, arguments in calls:
        assert command in COMMANDS, f"clap-ds {command}{arguments}"
        # Arguments after -- are another command's.
        used = re.findall(r"(?<= )--\w+", arguments.partition(" -- ")[0])
        assert {*used} <= options[command], f"clap-ds {command}{arguments}"
    by_path = r"(python3?|-m) (-m )?(analysis|clap_ds)[/.](?!model|config|launch|distributed)"
    assert not re.search(by_path, text)


def test_command_help_imports_no_heavy_package():
    """In a new process: this one has imported everything."""
    program = """
import contextlib, io, sys
from clap_ds import cli

def check(name, modules):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
    imported = [module for module in modules if module in sys.modules]
    assert not imported, (name, imported)

heavy = ["torch", "transformers", "deepspeed"]
for name in ("--help", "hostfile", "preflight", "submit", "sweep"):
    check(name, ["numpy", "pydantic", *heavy])
for name in cli.MODULES:
    check(name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_overview_lists_all_commands(capsys):
    assert cli.main([]) == 0
    output = capsys.readouterr().out
    for name in cli.MODULES:
        assert re.search(rf"^  {name} ", output, re.MULTILINE), name
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("scalin x", "did you mean 'scaling'"),
        ("flops --contxt_length 5", "did you mean '--context_length'"),
        ("shards size", "choose from"),
    ],
)
def test_wrong_command_is_refused_with_a_hint(command, message, capsys):
    try:
        code = cli.main(command.split())
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_options_with_dashes_equal_those_with_underscores():
    parser = make_parser("Do something.")
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("more", nargs="*")
    arguments = parser.parse_args(["--micro-batch=3", "--", "--micro-batch"])
    assert (arguments.micro_batch, arguments.more) == (3, ["--micro-batch"])


def test_presets_command_lists_all(capsys):
    assert cli.main(["presets"]) == 0
    output = capsys.readouterr().out
    for name in (*list_presets(), *(path.stem for path in CONFIGS.glob("*.json"))):
        assert name in output


def read_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's tables by the name in their first column."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [re.split(r" *\| *", row)[1:-1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    return {name.strip("`"): cells for name, *cells in rows}


def test_commands_page_has_each_command_with_its_purpose():
    rows = read_rows("cli.md")
    for commands in cli.GROUPS.values():
        for name, (_, purpose) in commands.items():
            assert rows[f"clap-ds {name}"][0].partition(":")[0] == purpose.partition(":")[0]


def test_presets_page_has_each_name_with_its_description():
    rows = read_rows("presets.md")
    for name, description in {**PRESETS, **CONFIGURATIONS}.items():
        assert rows[name][0] == description


@pytest.mark.parametrize("name", PRESETS)
def test_presets_page_states_sizes_and_gflops(name):
    preset = load_preset(name)
    tokens = TextLengths.fixed(min(77, preset.text.max_tokens))
    _, sizes, joint_dim, _, gflops = read_rows("presets.md")[name]
    channels = f"{preset.audio.embed_dim}; {', '.join(map(str, preset.audio.depths))}"
    assert (sizes, joint_dim) == (channels, f"{preset.joint_dim:,}")
    assert gflops == f"{forward_flops(preset, tokens, 'model') / 1e9:.2f}"
