"""Test that shards made in parts, as on many nodes, equal those of one command."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.data.build_shards import caption_lists
from tests.data.builds import RATE, run, tone, write_list
from tests.data.tars import wav

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "shards.sh"
OPTIONS = "--held_out 0.25 --shards 5 --train_tokenizer 300 --max_left_out 0.1"
SBATCH = '#!/bin/bash\n{ echo "$*"; tail -n 1; } >> jobs\nwc -l < jobs\n'


def test_the_scripts_jobs_make_what_one_command_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts run in any order; one is repeated while another runs, and one is missing at first."""
    path = write_list(tmp_path, 20, "audio/same.wav,x\naudio/gone.wav,x\n")
    whole, parts, options = tmp_path / "whole", tmp_path / "parts", OPTIONS.split()
    (tmp_path / "audio" / "same.wav").write_bytes(wav(tone(3), RATE, "PCM_16"))
    assert run(path, whole, *options) == 0
    expected = capsys.readouterr().out
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    places = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([SCRIPT, "3", "build", path, parts, *options], cwd=tmp_path, env=places, check=True)
    jobs = (tmp_path / "jobs").read_text()
    after = ["--array=1-3 --dependency=afterok:2", "--dependency=afterany:4"]
    assert re.findall("--array.*|--dep.*", jobs) == after
    commands = re.findall("exec clap-shards (.*)", jobs)

    def do(job: int, part: int = 0) -> int:
        words = shlex.split(commands[job].replace("$SLURM_ARRAY_TASK_ID", str(part)))
        return exit_code_of(lambda: shards.main(words))

    assert do(0) == 0
    monkeypatch.delattr(caption_lists, "_look")  # no other job reads the files
    assert (do(1, part=3), do(1, part=1), do(1, part=3)) == (0, 0, 0)
    assert do(2) == 2
    assert "run --part I/3 with I = 2" in capsys.readouterr().err
    assert do(1, part=2) == 0
    assert "part 2/3: " in capsys.readouterr().out
    assert do(2) == 0
    said = capsys.readouterr().out.removeprefix("6 of 6 shards already exist\n")
    assert said.replace(str(parts), str(whole)) == expected
    seen = [{file.name: file.read_bytes() for file in folder.glob("[!.]*.*")} for folder in (parts, whole)]
    assert seen[0] == seen[1]
