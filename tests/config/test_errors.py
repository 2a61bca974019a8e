"""Messages of user errors."""

import pytest

from clap_ds.config.errors import UserError, exit_code_of


def test_two_problems_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("a\x1b[2J: wrong\nb: wrong, too\n\n    try this")

    assert exit_code_of(refuse) == 2
    assert capsys.readouterr().err == "error: a\\x1b[2J: wrong\n       b: wrong, too\n\n           try this\n"


def test_a_missing_packages_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert exit_code_of(lambda: lack("soundfile")) == 2
    assert "No module named 'soundfile': pip install 'clap-ds[train]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        exit_code_of(lambda: lack("our_own_typo"))
