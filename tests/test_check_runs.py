"""Validate run configurations without torch, in one process."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clap_ds import check_runs
from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import with_field
from clap_ds.utils.errors import UserError
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


@pytest.mark.parametrize(
    ("field", "value", "is_missing"),
    [
        ("data.shards", "x-{0..3}.tar", True),
        ("data.shards", {"here.tar": 1.0, "none/../x.tar": 2.0, "x.tar": 1.0}, True),
        ("data.shards", ["*.tar", "file:///proc/none-*.tar"], True),
        ("data.shards", ["*.tar", "s3://bucket/x.tar"], False),
        ("data.shards", "folder.tar", True),
        ("data.shards", "sounds", True),
        ("data.shards", "", True),
        ("data.tokenizer", "", True),
        ("data.tokenizer", "./none", True),
        ("data.tokenizer", "roberta-base", False),
        ("data.tokenizer", "open_clip:none", False),
        ("evaluation.tokenizer", "/proc/none", True),
        ("evaluation.retrieval", {"shards": "x.tar"}, True),
        ("evaluation.zero_shot", {"shards": "x.tar"}, True),
        ("train.pretrained", "none.pt", True),
        ("train.pretrained", "laion/clap-htsat-unfused", False),
        ("train.resume", "auto", False),
        ("train.resume", "/proc/none", True),
    ],
)
def test_path_that_is_missing_in_a_folder_that_exists_is_a_problem(
    field: str, value: Any, is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.tar").touch()
    (tmp_path / "folder.tar").mkdir()
    data = {"source": "webdataset", "shards": "here.tar", "tokenizer": "roberta-base"}
    run = micro_run(clap={"data": data, "train": {"max_samples": 64}})
    (tmp_path / "run.json").write_text(json.dumps(with_field(run, f"clap.{field}", value)))
    with (
        pytest.raises(UserError, match=f"run.json: clap.{field}.* no such file")
        if is_missing
        else nullcontext()
    ):
        check_runs.check([tmp_path / "run.json"], train=True)


def test_path_that_only_this_host_may_lack_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shards, options in (
        ("/none/x.tar", {}),
        ("/x.tar", {}),
        (f"{tmp_path}/x.tar", {"may_appear": True}),
    ):
        data = {"source": "webdataset", "shards": shards, "tokenizer": "roberta-base"}
        (tmp_path / "run.json").write_text(json.dumps(micro_run(clap={"data": data})))
        check_runs.check([tmp_path / "run.json"], train=False, **options)
        assert f"no such file: {shards}" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_runs.importlib.util.find_spec
    find = lambda name: None if name == "webdataset" else real(name)  # noqa: E731
    monkeypatch.setattr(check_runs.importlib.util, "find_spec", find)
    shards = {"source": "webdataset", "shards": "x-{0..3}.tar", "tokenizer": "roberta-base"}
    for data in ({"source": "synthetic"}, shards):
        (tmp_path / f"{data['source']}.json").write_text(json.dumps(micro_run(clap={"data": data})))
    check_runs.check([tmp_path / "synthetic.json"], train=False)
    with pytest.raises(
        UserError,
        match=r"webdataset.json: webdataset not installed for .+: run `pip install 'clap-ds\[train\]'`",
    ):
        check_runs.check([tmp_path / "webdataset.json"], train=False)
