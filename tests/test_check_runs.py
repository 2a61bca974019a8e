"""Runs' JSONs checked without torch, in one process."""

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import micro_run

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_is_judged_in_one_process_without_torch(tmp_path: Path) -> None:
    runs = {
        "good": micro_run(clap={"train": {"samples": 64}}),
        "no_samples": micro_run(),
        "windws": micro_run(clap={"bench": {"windws": 2}}),
        "zwei": micro_run(train_micro_batch_size_per_gpu="zwei"),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    files = [str(tmp_path / f"{name}.json") for name in runs]
    command = [sys.executable, "-X", "importtime", "-m", "clap_ds.check_runs", *files]

    def problems(*options: str) -> tuple[int, list[str]]:
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        heading, _, versions = done.stdout.partition(" ")
        assert heading == "clap-check"
        assert set(json.loads(versions)) == {"python", "torch", "deepspeed", "pydantic"}
        lines = done.stderr.splitlines()
        imported = {
            line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time")
        }
        assert not imported & {"torch", "deepspeed", "numpy", "transformers"}
        said = [line.removeprefix("error: ").strip() for line in lines if not line.startswith("import time")]
        return done.returncode, [line.removeprefix(f"{tmp_path}/") for line in said]

    code, said = problems()
    assert (code, len(said)) == (2, 2)
    assert said[0].startswith("windws.json: clap.bench.windws: no such field; did you mean 'windows'?")
    assert said[1].startswith("zwei.json: train_micro_batch_size_per_gpu: expected a whole number")
    code, said = problems("--train")
    assert (code, len(said)) == (2, 3)
    assert said[0].startswith("no_samples.json: clap.train: missing samples or epochs")
