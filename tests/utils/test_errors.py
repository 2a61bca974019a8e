"""Messages of user errors."""

import tomllib

import pytest

from clap_ds.utils.errors import (
    EXTRAS,
    LONGEST_LINE,
    LONGEST_NAME,
    UserError,
    exit_code_of,
    printable,
)
from tests.conftest import ROOT


def test_user_error_is_escaped_and_its_further_lines_indented(capsys):
    def refuse() -> None:
        raise UserError("a\x1b[2J: wrong\nb: wrong, too\n\n    try this")

    assert exit_code_of(refuse) == 2
    message = "error: a\\x1b[2J: wrong\n       b: wrong, too\n\n           try this\n"
    assert capsys.readouterr().err == message


def test_missing_package_is_named_with_its_extra(capsys):
    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert exit_code_of(lambda: lack("soundfile")) == 2
    assert "No module named 'soundfile': pip install 'clap-ds[train]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        exit_code_of(lambda: lack("our_own_typo"))


LONG = "-token" * 1000


@pytest.mark.parametrize("name", [f"a/{LONG}/manifest.json", repr(LONG.replace("-", " "))])
def test_long_name_is_cut_in_message(name):
    message = str(UserError(f"can't read {name}: damaged"))
    assert message.startswith("can't read ")
    assert message.endswith(": damaged")
    assert LONGEST_NAME <= len(message) < LONGEST_NAME + 50


def test_long_line_is_cut_in_message():
    text = "no column x; found " + "column, " * 10**5
    lines = printable(f"{text}\nother", "\n").split("\n")
    assert len(lines[0]) == LONGEST_LINE
    assert lines[1] == "other"


def test_extras_have_names_that_every_pip_finds():
    """pip before 24 installs nothing for a name with an underscore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS.values()) <= extras.keys()
    assert not [name for name in extras if "_" in name]
