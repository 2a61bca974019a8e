"""Errors in a run's JSON name the file, the field, what was expected and the nearest name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.reference import reference
from clap_ds.config.settings import ClapSettings, load_run
from clap_ds.utils.errors import UserError

WriteRun = Callable[..., Path]
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"bench": {"windws": 3}},
        r"clap\.bench\.windws: no such field; did you mean 'clap.bench.windows'\?",
    ),
    ({"model": {"drop_path": 1.5}}, r"clap\.model\.drop_path: expected less than 1, found 1\.5"),
    (
        {"model": {"preset": "htsat_tiny"}},
        r"no preset 'htsat_tiny'.*; expected one of clap_htsat_tiny_r.*; or the path of",
    ),
    (
        {"data": {"source": "shard"}},
        r"clap\.data\.source: expected 'synthetic' or 'webdataset', found \"shard\"$",
    ),
    ({"data": {"source": "webdatset"}}, r"clap\.data\.source: .*; did you mean 'webdataset'\?"),
    ({"compile": "tower"}, r"clap\.compile: expected .*, found \"tower\"; did you mean 'towers'\?"),
    (
        {"data": {"source": "webdataset", "stage_to": "tmp"}},
        r"clap\.data\.stage_to: expected a path .*, found \"tmp\"",
    ),
    (
        {"data": {"source": "webdataset", "shards": "a.tar"}},
        r"clap\.data\.tokenizer: field required",
    ),
    (
        {"data": {"source": "synthetic", "placment": "host"}},
        r"data\.placment: no such field; did you mean 'clap.data.placement'",
    ),
    (
        {"data": {"source": "synthetic", "resampled": True}},
        r"data\.resampled: no such field; only another kind of clap\.data",
    ),
    (
        {"data": {"source": "synthetic", "caption_lengths": {"8": 1.0, "99": 1.0}}},
        r"context_length = 16, found \['99'\]",
    ),
    (
        {"data": {"source": "synthetic", "placement": "device", "num_workers": 2}},
        r"data\.num_workers: expected 0 with placem",
    ),
    (
        {"context_length": 600},
        r"clap\.context_length: expected at most 64, the limit of micro, found 600",
    ),
    (
        {"train": {"freeze": ["text"], "lr_scale": {"text": 0.1}}},
        r"train\.lr_scale: text is in clap\.train\.freeze",
    ),
    ({"train": {"freeze": ["audio", "text", "text"]}}, r"clap\.train\.freeze: .* logit scale"),
    (
        {"loss": "siglip"},
        r"clap\.loss\.kind: expected 'softmax' or 'sigmoid', found \"siglip\"; did you mean 'sigmoid'",
    ),
    ({"data": "shards/*.tar"}, r"clap\.data: expected an object, found"),
    *(
        ({"train": {name: 1}}, rf"clap\.train\.{name}: no such field; did you mean '{field}'\?")
        for name, field in (
            ("lr", r"optimizer\.params\.lr"),
            ("learning_rate", r"optimizer\.params\.lr"),
            ("wd", r"optimizer\.params\.weight_decay"),
            ("warmup", r"scheduler\.params\.warmup_num_steps"),
            ("warmup_steps", r"scheduler\.params\.warmup_num_steps"),
            ("batch_size", "train_micro_batch_size_per_gpu"),
            ("accum_freq", "gradient_accumulation_steps"),
            ("precision", r"bf16\.enabled"),
            ("num_epochs", r"clap\.train\.epochs"),
        )
    ),
    (
        {"train": {"lr_scale": {"txt": 0.5}}},
        r"lr_scale\.txt.*expected 'audio' or 'text', found \"txt\"",
    ),
]
MISTAKES_OUTSIDE: list[tuple[dict[str, Any], str]] = [
    (
        {"context_length": 4},
        r"context_length: no such field; did you mean 'clap\.context_length'\?",
    ),
    (
        {"steps_per_print": 10**30},
        r"steps_per_print: expected at most 9,007,199,254,740,992, found 10+",
    ),
    ({"gradient_acumulation_steps": 1}, r"did you mean 'gradient_accumulation_steps'\?"),
    (
        {"zero_optimization": {"stage": 3}},
        r"zero_optimization\.stage: expected 0 \(plain data parallel\), found 3",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        r'torch_autocast\.dtype: expected "bfloat16"',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weigth_decay": 0.1}}},
        r"optimizer\.params\.weigth_decay: no such field; did you mean 'optimizer\.params\.weight_decay'\?$",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": [1]}},
        r"optimizer\.params: expected an object, found \[1\]",
    ),
    (
        {"scheduler": {"type": "WarmupCosinLR"}},
        r"scheduler\.type: .* did you mean 'WarmupCosineLR'\?",
    ),
    (
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_step": 1, "warmup_type": "linera"},
            }
        },
        r"(?s)warmup_type: expected 'log' or 'linear'.*warmup_num_step: no such field; did you mean '.*warmup_num_steps'\?",
    ),
    ({"wandb": {"enabled": True}}, r"wandb\.enabled: wandb is not installed"),
]


@pytest.mark.parametrize(
    ("changes", "message"), [({"clap": clap}, m) for clap, m in MISTAKES] + MISTAKES_OUTSIDE
)
def test_mistake_is_refused_with_words_that_help(
    changes: dict[str, Any], message: str, write_run: WriteRun
) -> None:
    path = write_run(**changes)
    with pytest.raises(UserError, match=message) as caught:
        load_run(path)
    assert all(line.startswith(f"{path}: ") for line in str(caught.value).splitlines())


def test_all_mistakes_are_shown_at_once(write_run: WriteRun) -> None:
    with pytest.raises(UserError) as caught:
        load_run(write_run(train_micro_batch_size_per_gpu=0, clap={"seed": -1, "text_token": 3}))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n  "b": }', r"run\.json:2:8: not valid JSON"),
        ('{"a": 1, "a": 2}', r"field 'a' appears twice"),
        ('{"clap": 3}', r"clap: expected an object, found 3"),
        (
            '{"train_batch_size": 4}',
            r"gradient_clipping: missing; DeepSpeed's default is 1\.0 in bf16",
        ),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / "run.json")


def test_deepspeeds_part_is_handed_on_unchanged_and_a_resolved_run_loads_to_the_same(
    write_run: WriteRun, tmp_path: Path
) -> None:
    path = write_run(
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, clap={"seed": 5}
    )
    run = load_run(path)
    again = tmp_path / "config.json"
    assert {**run.deepspeed, "clap": ...} == {**json.loads(path.read_text()), "clap": ...}
    again.write_text(json.dumps(run.resolved()))
    assert load_run(again).clap == run.clap
    assert set(json.loads(again.read_text())["clap"]) == set(ClapSettings.model_fields)


def test_every_shipped_configuration_loads() -> None:
    paths = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
    assert len(paths) >= 5
    for path in paths:
        load_run(path)


def test_the_reference_of_all_fields_is_current_and_says_what_each_means() -> None:
    page = reference()
    assert (Path(__file__).parents[2] / "docs" / "reference.md").read_text() == page, (
        "regenerate it as its header says"
    )
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_models_published_name_is_its_preset(write_run: WriteRun) -> None:
    for name, joint_dim in (
        ("HTSAT-tiny-Roberta-base", 768),
        ("CLAP-HTSAT-tiny-Roberta-base", 512),
    ):
        clap = load_run(write_run(clap={"model": {"preset": name}})).clap
        assert (
            clap.model.preset
            == clap.preset().name
            == load_preset(name).name
            == name.lower().replace("-", "_")
        )
        assert clap.preset().joint_dim == joint_dim
