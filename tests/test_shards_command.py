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
