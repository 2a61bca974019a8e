"""Validate run configurations without torch, in one process."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from clap_ds import check_runs
from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import with_field
from clap_ds.utils.errors import UserError
from tests.conftest import micro_run

ROOT = Path(__file__).resolve().parents[1]


def test_checked_files_are_refused_in_one_process_without_torch(tmp_path):
    runs = {
        "valid": micro_run(clap={"train": {"max_samples": 64}}),
        "no_samples": micro_run(),
        "typo": micro_run(clap={"bench": {"windws": 2}}),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    command = [sys.executable, "-X", "importtime", "-m", "clap_ds.check_runs", "--train"]
    command += [str(tmp_path / f"{name}.json") for name in runs]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    versions = json.loads(done.stdout.removeprefix("clap-check "))
    assert {*versions} == {"python", *PACKAGES}
    imported = re.findall(r"^import time:.*\| +([^\s.]+)", done.stderr, re.MULTILINE)
    assert not {*imported} & {"torch", "deepspeed", "numpy", "transformers"}
    assert "no_samples.json: clap.train: max_samples" in done.stderr
    assert "typo.json: clap.bench.windws: no such field" in done.stderr
    assert "valid.json" not in done.stderr


SHARDS = {"source": "webdataset", "shards": "here.tar", "tokenizer": "roberta-base"}


@pytest.mark.parametrize(
    ("field", "value", "is_missing"),
    [
        ("data.shards", {"here.tar": 1.0, "x-{0..3}.tar": 1.0}, True),
        ("data.shards", ["*.tar", "memory://bucket/x.tar"], False),
        # a folder
        ("data.shards", "folder.tar", True),
        ("data.shards", "", True),
        ("data.tokenizer", "./none", True),
        ("evaluation.zero_shot", {"shards": "x.tar"}, True),
        ("train.pretrained", "none.pt", True),
        # on the Hub
        ("train.pretrained", "laion/clap-htsat-unfused", False),
        ("train.resume", "auto", False),
    ],
)
def test_check_of_missing_path_in_existing_folder_is_refused(
    field, value, is_missing, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.tar").touch()
    (tmp_path / "folder.tar").mkdir()
    run = micro_run(clap={"data": SHARDS, "train": {"max_samples": 64}})
    (tmp_path / "run.json").write_text(json.dumps(with_field(run, f"clap.{field}", value)))
    refusal = pytest.raises(UserError, match=f"run.json: clap.{field}.* no such file")
    with refusal if is_missing else nullcontext():
        check_runs.check([tmp_path / "run.json"], train=True)


@pytest.mark.parametrize(
    ("shards", "options"),
    [("/none/x.tar", {}), ("/x.tar", {}), ("x.tar", {"may_appear": True})],
)
def test_check_of_path_that_hosts_may_have_prints_a_note(shards, options, tmp_path, capsys):
    run = micro_run(clap={"data": SHARDS | {"shards": shards}})
    (tmp_path / "run.json").write_text(json.dumps(run))
    check_runs.check([tmp_path / "run.json"], train=False, **options)
    assert f"no such file: {shards}" in capsys.readouterr().out


def test_check_of_shards_without_webdataset_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text(json.dumps(micro_run(clap={"data": SHARDS})))
    monkeypatch.setattr(check_runs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"webdataset, .* run `pip install 'clap-ds\[train\]'`"):
        check_runs.check([tmp_path / "run.json"], train=False)
