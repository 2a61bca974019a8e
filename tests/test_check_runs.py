"""Validate run configurations without torch, in one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds import check_runs
from clap_ds.check_runs import PACKAGES
from clap_ds.config.errors import UserError
from tests.conftest import micro_run

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_is_judged_in_one_process_without_torch(tmp_path: Path) -> None:
    runs = {
        "good": micro_run(clap={"train": {"max_samples": 64}}),
        "no_samples": micro_run(),
        "windws": micro_run(clap={"bench": {"windws": 2}}),
        "enable": micro_run(torch_autocast={"enable": True}),
        "zwei": micro_run(train_micro_batch_size_per_gpu="zwei"),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    command = [sys.executable, "-X", "importtime", "-m", "clap_ds.check_runs", "--train"]
    command += [str(tmp_path / f"{name}.json") for name in runs]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    found = json.loads(done.stdout.removeprefix("clap-check "))
    assert {*found} == {"python", *PACKAGES}
    imported = re.findall(r"^import time:.*\| +([^\s.]+)", done.stderr, re.MULTILINE)
    assert not {*imported} & {"torch", "deepspeed", "numpy", "transformers"}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert [re.sub("^.*/", "", line)[:44] for line in said] == [
        "no_samples.json: clap.train: max_samples and",
        "windws.json: clap.bench.windws: no such fiel",
        "enable.json: torch_autocast.enable: no such ",
        "zwei.json: train_micro_batch_size_per_gpu: e",
    ]


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_runs.importlib.util.find_spec
    find = lambda name: None if name == "webdataset" else real(name)  # noqa: E731
    monkeypatch.setattr(check_runs.importlib.util, "find_spec", find)
    shards = {"source": "webdataset", "shards": "x-{0..3}.tar", "tokenizer": "roberta-base"}
    for data in ({"source": "synthetic"}, shards):
        (tmp_path / f"{data['source']}.json").write_text(json.dumps(micro_run(clap={"data": data})))
    check_runs.check([tmp_path / "synthetic.json"], train=False)
    with pytest.raises(
        UserError, match=r"webdataset.json: webdataset not installed for .+: run `pip install 'clap-ds\[train\]'`"
    ):
        check_runs.check([tmp_path / "webdataset.json"], train=False)
