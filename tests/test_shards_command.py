"""The command that has all of shards' subcommands: it loads the one that runs, and says of mistakes what they are."""

import subprocess
import sys

import pytest

from clap_ds import shards


def test_help_lists_all_and_loads_none() -> None:
    script = (
        "import sys, contextlib; from clap_ds import shards\n"
        "with contextlib.suppress(SystemExit): shards.main(['--help'])\n"
        "sys.exit(sorted(sys.modules.keys() & {'torch', 'numpy', 'pydantic'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"  {name} " in done.stdout for name in ("build", "prepare", "measure", "size"))


@pytest.mark.parametrize("name", shards.COMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        shards.main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: clap-shards {name} ")


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "required: command"), (["sizes"], "choose from"), (["size", "--clips=5", "--clip", "5"], "--clip 5")],
)
def test_mistakes_in_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        shards.main(words)
    assert message in capsys.readouterr().err


OF_FUSION = ["--kind", "mel", "--preset", "clap_htsat_tiny_roberta_base_fused"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "."], "clap.data.shards: expected tar files, found the folder"),
        (["prepare", "a.tar", "out", *OF_FUSION], f"--kind mel: {OF_FUSION[-1]} has feature fusion"),
    ],
)
def test_other_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["clap-shards", *words])
    with pytest.raises(SystemExit, match="2"):
        shards.command()
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1
