"""Messages of user errors."""

import pytest

from clap_ds.utils.errors import LONGEST_LINE, LONGEST_NAME, UserError, exit_code_of, printable


def test_two_problems_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("a\x1b[2J: wrong\nb: wrong, too\n\n    try this")

    assert exit_code_of(refuse) == 2
    assert (
        capsys.readouterr().err
        == "error: a\\x1b[2J: wrong\n       b: wrong, too\n\n           try this\n"
    )


def test_a_missing_packages_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert exit_code_of(lambda: lack("soundfile")) == 2
    assert "No module named 'soundfile': pip install 'clap-ds[train]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        exit_code_of(lambda: lack("our_own_typo"))


LONG = "-token" * 1000


@pytest.mark.parametrize(
    "name", [f"a/{LONG}/manifest.json", repr(LONG.replace("-", " ")), f'"{LONG}"', LONG]
)
def test_a_long_name_from_a_file_is_cut_in_messages(name: str) -> None:
    for message in (
        str(UserError(f"can't read {name}: damaged")),
        printable(f"can't read {name}: damaged"),
    ):
        assert message.startswith("can't read ")
        assert message.endswith(": damaged")
        assert LONGEST_NAME <= len(message) < LONGEST_NAME + 50


def test_a_line_that_lists_many_names_is_cut() -> None:
    first, second = printable("no column x; found " + "column, " * 10**5 + "\nother", "\n").split(
        "\n"
    )
    assert (len(first), second) == (LONGEST_LINE, "other")
    path = "/".join(["folder" * 30] * 8)
    assert printable(f"{path}: can't be read") == f"{path}: can't be read"
