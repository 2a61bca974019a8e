"""Test the build command: from a list to training data, resuming, errors, and parts as on many nodes."""

import hashlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData
from clap_ds.data.build_shards import caption_lists
from clap_ds.data.dataloader import build_batches
from tests.data.builds import RATE, items_by_source, run, tone, write_list
from tests.data.conftest import OpenSource
from tests.data.tars import wav

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "shards.sh"
OPTIONS = "--held_out 0.25 --shards 5 --train_tokenizer 300 --max_left_out 0.1"
SBATCH = '#!/bin/bash\n{ echo "$*"; tail -n 1; } >> jobs\nwc -l < jobs\n'


def test_a_newcomer_can_train_on_the_result(
    tmp_path: Path, micro: ClapConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed settings load, held-out items are separate, and the manifest's counts match an epoch."""
    out, path = tmp_path / "out", write_list(tmp_path, 20, "audio/gone.wav,x\n")
    (tmp_path / "audio" / "clip 00.wav").write_bytes(b"broken")
    options = (path, out, "--held_out", 0.25, "--shards", 3, "--train_tokenizer", 300, "--max_left_out")
    assert run(*options, 0.09) == 1
    printed = capsys.readouterr()
    assert f"skipped 2, listed with reasons in {out}/broken.jsonl" in printed.out
    assert "--max_left_out" in printed.err
    assert run(*options, 0.1) == 0
    train, held_out = items_by_source(out, "train-*.tar"), items_by_source(out, "held_out-*.tar")
    assert len({**train, **held_out}) == len(train) + len(held_out) == 19
    assert len(list(out.glob("train-*.tar"))) == 3
    printed = capsys.readouterr().out
    assert f"train: {len(train)} items in 3 shard(s)" in printed
    settings = json.JSONDecoder().raw_decode(printed.partition('"data": ')[2])[0]
    data = ShardData.model_validate({**settings, "num_workers": 0})
    cpu = torch.device("cpu")
    with build_batches(data, model=micro, context_length=12, micro_batch=15, device=cpu) as source:
        next(source)
        assert (source.statistics()["epoch_samples"], source.statistics()["num_broken_items"]) == (len(train), 0)
    manifest = json.loads((out / "manifest.json").read_text())["shards"]
    for path in out.glob("*.tar"):
        assert manifest[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(record["seconds"] for record in manifest.values()) == pytest.approx(19 * 0.05)


def test_other_contents_and_other_lists_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_list(tmp_path, 3), tmp_path / "out"
    assert run(path, out) == 0
    assert run(path, out) == 0
    assert "1 of 1 shards already exist" in capsys.readouterr().out
    for folder, options, message in (
        (tmp_path / "audio", (), "isn't an empty folder"),
        (path / "out", (), "Not a directory"),
        (out, ("--kind", "waveform", "--preset", "micro"), "other options"),
        (out, ("--shards", 2), "other options"),
    ):
        assert run(path, folder, *options) == 2
        assert message in capsys.readouterr().err
    path.write_text(path.read_text().replace("a tone", "a sine"))
    assert run(path, out) == 2


@pytest.mark.parametrize(("clips", "different", "is_few"), [(3, 1, 1), (1, 1, 0), (99, 2, 0), (150, 2, 1), (150, 3, 0)])
def test_building_and_training_warn_of_captions_that_hardly_differ(
    tmp_path: Path, open_source: OpenSource, capsys: Any, clips: int, different: int, is_few: int
) -> None:
    heading, *rows = write_list(tmp_path, clips).read_text().splitlines()
    rows = [f"{row.partition(',')[0]},{number % different}" for number, row in enumerate(rows)]
    (tmp_path / "list.csv").write_text("\n".join([heading, *rows]))
    run(tmp_path / "list.csv", tmp_path / "out")
    with open_source(f"{tmp_path}/out/*.tar", micro_batch=150) as source:
        next(source)
    assert capsys.readouterr().err.count(f"only {different} different caption(s) among {clips} clips") == 2 * is_few


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
