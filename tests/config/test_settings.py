"""Errors in a run's JSON name the file, the field, what was expected and the nearest name."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

from clap_ds.config.model import load_preset
from clap_ds.config.reference import reference
from clap_ds.config.settings import ClapSettings, load_run
from clap_ds.config.urls import find_url_problems
from clap_ds.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# fields of `clap`, and the message about them
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"profile": {"start_step": 1}}, "profile.start_step: expected greater than or equal to 2"),
    ({"profile": {"ranks": []}}, "profile.ranks: expected at least 1 items"),
    ({"bench": {"windws": 3}}, "bench.windws: no such field; did you mean 'clap.bench.windows'?"),
    ({"model": {"drop_path": 1.5}}, "model.drop_path: expected less than 1, found 1.5"),
    ({"data": {"source": "webdatset"}}, "data.source: … did you mean 'webdataset'?"),
    (
        {"data": {"source": "webdataset", "stage_to": "tmp"}},
        'data.stage_to: expected a path … found "tmp"',
    ),
    ({"data": {"source": "webdataset", "shards": "a.tar"}}, "data.tokenizer: field required"),
    (
        {"data": {"source": "synthetic", "resampled": True}},
        "data.resampled: no such field; only another kind of clap.data",
    ),
    ({"data": "shards/*.tar"}, "data: expected an object, found"),
    (
        {"loss": "siglip"},
        "loss.kind: expected 'softmax'… found \"siglip\"; did you mean 'sigmoid'",
    ),
    # names of other trainers
    ({"train": {"learning_rate": 1}}, "…did you mean 'optimizer.params.lr'?"),
    ({"train": {"num_epochs": 1}}, "…did you mean 'clap.train.epochs'?"),
    # fields that contradict each other
    (
        {"data": {"source": "synthetic", "caption_lengths": 99}},
        "data.caption_lengths: … context_length = 16, found ['99']",
    ),
    (
        {"data": {"source": "synthetic", "placement": "device", "num_workers": 2}},
        "data.num_workers: expected 0 with placement",
    ),
    (
        {"context_length": 600},
        "context_length: expected at most 64, the limit of micro, found 600",
    ),
    (
        {"train": {"freeze": ["text"], "lr_scale": {"text": 0.1}}},
        "train.lr_scale: text is in clap.train.freeze",
    ),
    ({"train": {"freeze": ["audio", "text", "text"]}}, "train.freeze: … logit scale"),
    ({"train": {"epochs": 1, "max_samples": 1}}, "train: set max_samples or epochs"),
    # URLs
    (
        {"train": {"resume": "htps://host/run"}},
        "train.resume: htps://host/run: htps:// is no known protocol; did you mean 'https'?",
    ),
    (
        {"checkpoint": {"remote_sync": "s3://key:hush@bucket/run"}},
        "checkpoint.remote_sync: the s3 URL of bucket contains credentials",
    ),
    (
        {"checkpoint": {"folder": "s3://bucket/run"}},
        "checkpoint.folder: expected a folder; clap.checkpoint.remote_sync",
    ),
]
MISTAKES_OUTSIDE: list[tuple[dict[str, Any], str]] = [
    ({"context_length": 4}, "context_length: no such field; did you mean 'clap.context_length'?"),
    (
        {"steps_per_print": 10**30},
        "steps_per_print: expected at most 9,007,199,254,740,992, found 10",
    ),
    (
        {"zero_optimization": {"stage": 3}},
        "zero_optimization.stage: expected 0 (plain data parallel), found 3",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        'torch_autocast.dtype: expected "bfloat16"',
    ),
    ({"wandb": {"enabled": True}}, "wandb.enabled: wandb is not installed"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"clap": clap}, f"clap.{message}") for clap, message in MISTAKES] + MISTAKES_OUTSIDE,
)
def test_run_with_mistake_is_refused_with_file_field_and_hint(changes, message, write_run):
    path = write_run(**changes)
    with pytest.raises(UserError, match=re.escape(message).replace("…", ".*")) as caught:
        load_run(path)
    for line in str(caught.value).splitlines():
        assert line.startswith(f"{path}: ")
        assert "hush" not in line


def test_profiled_rank_beyond_the_world_size_is_refused(write_run):
    path = write_run(clap={"profile": {"ranks": [0, 2]}})
    with pytest.raises(UserError, match=r"clap\.profile\.ranks: .* below 2"):
        load_run(path, world_size=2)


def test_run_with_several_mistakes_lists_all(write_run):
    with pytest.raises(UserError) as caught:
        load_run(write_run(train_micro_batch_size_per_gpu=0, clap={"seed": -1, "text_token": 3}))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n  "b": }', r"run\.json:2:8: not valid JSON"),
        ('{"clap": 3}', r"clap: expected an object, found 3"),
        ('{"train_batch_size": 4}', r"gradient_clipping: missing; DeepSpeed's default is 1\.0"),
    ],
)
def test_file_without_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / "run.json")


def test_resolved_run_loads_to_the_same_with_deepspeeds_part_unchanged(write_run, tmp_path):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    path = write_run(scheduler=scheduler, clap={"seed": 5})
    run = load_run(path)
    deepspeed = json.loads(path.read_text())
    del deepspeed["clap"]
    assert run.deepspeed == deepspeed
    record = tmp_path / "config.json"
    record.write_text(json.dumps(run.resolved()))
    assert load_run(record).clap == run.clap
    assert run.resolved()["clap"].keys() == ClapSettings.model_fields.keys()


def test_shipped_configurations_load():
    paths = sorted((ROOT / "ds_configs").glob("*.json"))
    assert len(paths) >= 5
    for path in paths:
        load_run(path)


def test_reference_page_is_current_and_describes_every_field():
    page = reference()
    committed = (ROOT / "docs" / "reference.md").read_text()
    assert committed == page, "regenerate it as its header says"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        assert not row.endswith("|  |"), row


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("CLAP-HTSAT-tiny-Roberta-base", "clap_htsat_tiny_roberta_base"),
        # open_clip's name of the same model as without `CLAP-`
        ("CLAP-HTSAT-base-Roberta-base", "htsat_base_roberta_base"),
    ],
)
def test_published_model_name_is_its_preset(name, preset, write_run):
    clap = load_run(write_run(clap={"model": {"preset": name}})).clap
    assert clap.model.preset == load_preset(name).name == preset


def test_captions_of_shards_are_packed_and_synthetic_ones_are_not(write_run):
    shards = {"source": "webdataset", "shards": "a.tar", "tokenizer": "x"}
    for clap, packs in (
        ({"data": shards}, True),
        ({}, False),
        ({"data": shards, "text_packing": False}, False),
        ({"text_packing": True}, True),
    ):
        assert load_run(write_run(clap=clap)).clap.packs_captions == packs


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("https://host/a.tar", "aiohttp", "pip install 'clap-ds[train]'"),
        ("s3://bucket/{0..3}.tar", "s3fs", "pip install 'clap-ds[s3]'"),
        ("gs://bucket/*.tar", "gcsfs", "pip install 'clap-ds[gcs]'"),
        ("sftp://host/a.tar", "paramiko", "pip install paramiko"),
    ],
)
@pytest.mark.parametrize("shards", [lambda url: url, lambda url: {"local/*.tar": 1, url: 2}])
def test_url_with_missing_package_names_command(url, package, command, shards, monkeypatch):
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    for name in ("http", "sftp"):
        monkeypatch.delitem(sys.modules, f"fsspec.implementations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (problem,) = find_url_problems({"data": {"shards": shards(url)}})
    assert problem.startswith(f"clap.data.shards: {url}: ")
    assert problem.endswith(command)
