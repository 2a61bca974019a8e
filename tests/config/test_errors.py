"""What a command says of a user's mistakes."""

import os
import subprocess
import sys

import pytest

from clap_ds.config.errors import UserError, exit_code_of


def test_two_problems_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("a: wrong\nb: wrong, too\n\n    try this")

    assert exit_code_of(refuse) == 2
    assert capsys.readouterr().err == "error: a: wrong\n       b: wrong, too\n\n           try this\n"


def test_a_reader_that_has_seen_enough_is_left_quietly() -> None:
    """As `| head`: what was printed is written when the command is over, to nobody."""
    script = "from clap_ds.config.errors import exit_code_of; exit(exit_code_of(lambda: print('x')))"
    (reader, writer), env = os.pipe(), os.environ | {"PYTHONUNBUFFERED": ""}
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
