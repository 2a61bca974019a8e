"""Test `clap-shards`: it imports only the subcommand that runs and reports mistakes."""

import sys

import pytest

from clap_ds import shards


@pytest.mark.parametrize("name", shards.COMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        shards.main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: clap-shards {name} ")


@pytest.mark.parametrize(
    ("words", "message"), [("sizes", "choose from"), ("prepare . x --kind mel --preset micro", "a folder")]
)
def test_mistakes_in_words(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["clap-shards", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        shards.command()
    assert message in capsys.readouterr().err
