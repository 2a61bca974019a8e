"""Messages of user errors."""

import pytest

from clap_ds.config.errors import UserError, exit_code_of


def test_two_problems_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("a\x1b[2J: wrong\nb: wrong, too\n\n    try this")

    assert exit_code_of(refuse) == 2
    assert capsys.readouterr().err == "error: a\\x1b[2J: wrong\n       b: wrong, too\n\n           try this\n"
