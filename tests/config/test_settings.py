"""Every mistake in a run's JSON is refused with the file, the field, what was expected and the nearest name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.runtime.config as deepspeed_config
import deepspeed.runtime.constants as deepspeed_constants
import pytest

from clap_ds.config.check import DEEPSPEED_FIELDS
from clap_ds.config.settings import ClapSettings, SettingsError, load_run

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"clap": {"bench": {"windws": 3}}}, r"clap\.bench\.windws: no such field; did you mean 'windows'\?"),
    "wrong type": ({"clap": {"bench": {"windows": "4"}}}, r'clap\.bench\.windows: expected a valid integer, found "4"'),
    "a bool for a number": (
        {"clap": {"model": {"drop_path": True}}},
        r"clap\.model\.drop_path: expected a valid number, found true",
    ),
    "out of range": (
        {"clap": {"model": {"drop_path": 1.5}}},
        r"clap\.model\.drop_path: expected less than 1, found 1\.5",
    ),
    "negative": ({"clap": {"seed": -1}}, r"clap\.seed: expected greater than or equal to 0, found -1"),
    "too few windows": (
        {"clap": {"bench": {"windows": 1}}},
        r"clap\.bench\.windows: expected greater than or equal to 2",
    ),
    "no such preset": (
        {"clap": {"model": {"preset": "htsat_tiny"}}},
        r"clap\.model\.preset: no preset 'htsat_tiny'; did you mean 'htsat_tiny_roberta_base'\?",
    ),
    "no such source": (
        {"clap": {"data": {"source": "shard"}}},
        r'clap\.data\.source: expected one of synthetic, shards, found "shard"',
    ),
    "no source": (
        {"clap": {"data": {"num_batches": 2}}},
        r"clap\.data\.source: expected one of synthetic, shards, found null",
    ),
    "missing in a source": (
        {"clap": {"data": {"source": "shards", "shards": "a.tar"}}},
        r"clap\.data\.tokenizer: missing",
    ),
    "misspelt in a source": (
        {"clap": {"data": {"source": "synthetic", "placment": "host"}}},
        r"clap\.data\.placment: no such field; did you mean 'placement'\?",
    ),
    "more tokens than positions": (
        {"clap": {"text_tokens": 600}},
        r"clap\.text_tokens: micro has positions for 64, found 600",
    ),
    "caption too long": (
        {"clap": {"data": {"source": "synthetic", "caption_lengths": {"8": 1.0, "99": 1.0}}}},
        r"clap\.data\.caption_lengths: .* text_tokens = 16, found '99'",
    ),
    "weightless histogram": (
        {"clap": {"data": {"source": "synthetic", "caption_lengths": {"8": 0.0}}}},
        r"clap\.data\.caption_lengths: the weights of the histogram add up to 0",
    ),
    "DeepSpeed's field in clap": (
        {"clap": {"bf16": {}}},
        r"clap\.bf16: bf16 is a DeepSpeed field: move it out of clap",
    ),
    "packed for plain attention": (
        {"clap": {"text": "packed", "model": {"preset": "micro", "attention": "sdpa"}}},
        r"clap\.text: packed captions need clap\.model\.attention 'auto', 'matmul' or 'triton', found 'sdpa'",
    ),
    "CPU kernels as they were asked for once": (
        {"clap": {"model": {"preset": "micro", "attention": "native"}}},
        r"clap\.model\.attention: no kernel 'native' any more: .* clap\.cpu_kernels 'auto'",
    ),
    "CUDA graphs of nothing": ({"clap": {"cuda_graphs": True}}, r"clap\.cuda_graphs: needs clap\.compile"),
    "CUDA graphs over kept features": (
        {"clap": {"cuda_graphs": True, "compile": "step", "train": {"accumulation": "cached"}}},
        r"clap\.cuda_graphs: a replay overwrites the features",
    ),
    "clap's field outside": ({"text_tokens": 4}, r"text_tokens: no such DeepSpeed field.*write clap\.text_tokens"),
    "misspelt DeepSpeed field": ({"gradient_acumulation_steps": 1}, r"did you mean 'gradient_accumulation_steps'\?"),
    "micro-batch of 0": (
        {"train_micro_batch_size_per_gpu": 0},
        r"train_micro_batch_size_per_gpu: .* at least 1, found 0",
    ),
    "micro-batch of 1.5": ({"train_micro_batch_size_per_gpu": 1.5}, r"expected a whole number, at least 1, found 1\.5"),
    "no micro-batch": ({"train_micro_batch_size_per_gpu": None}, r"train_micro_batch_size_per_gpu: missing"),
    "ZeRO-3": (
        {"zero_optimization": {"stage": 3}},
        r"zero_optimization\.stage: expected 0 \(plain data parallel\), found 3",
    ),
    "optimizer without type": ({"optimizer": {}}, r"optimizer\.type: missing"),
    "section that is no object": ({"bf16": True}, r"bf16: expected an object, found true or false"),
    "clap that is no object": ({"clap": 3}, r"clap: expected an object, found a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_refused_with_words_that_help(name: str, write_run: Callable[..., Path]) -> None:
    changes, message = MISTAKES[name]
    path = write_run(**{key: value for key, value in changes.items() if key != "clap" or isinstance(value, dict)})
    if not isinstance(changes.get("clap", {}), dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(SettingsError, match=message) as caught:
        load_run(path)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())


def test_all_mistakes_are_told_at_once(write_run: Callable[..., Path]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_run(write_run(train_micro_batch_size_per_gpu=0, clap={"seed": -1, "text_token": 3}))
    assert len(str(caught.value).splitlines()) == 3


def test_gradient_clipping_must_be_said(write_run: Callable[..., Path]) -> None:
    path = write_run()
    content = json.loads(path.read_text())
    del content["gradient_clipping"]
    path.write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=r"gradient_clipping: missing; DeepSpeed would clip to 1\.0 in bf16"):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n  "b": }', r"run\.json:2:8: not valid JSON"),
        ('{"a": 1, "a": 2}', r"field 'a' stands twice"),
        ("[1]", r"expected a JSON object, found a list"),
        ("", r"run\.json:1:1: not valid JSON"),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_run(tmp_path / "run.json")


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "htsat_tiny.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"htsat_tny\.json: no such file; did you mean '.*htsat_tiny\.json'"):
        load_run(tmp_path / "htsat_tny.json")


def test_deepspeed_part_is_handed_on_unchanged(write_run: Callable[..., Path]) -> None:
    path = write_run(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    content = json.loads(path.read_text())
    run = load_run(path)
    assert run.deepspeed == {key: value for key, value in content.items() if key != "clap"}


def test_resolved_run_loads_to_the_same(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(write_run(clap={"seed": 5}))
    again = tmp_path / "config.json"
    again.write_text(json.dumps(run.resolved()))
    assert load_run(again).clap == run.clap
    assert set(json.loads(again.read_text())["clap"]) == set(ClapSettings.model_fields)


def test_every_shipped_configuration_loads() -> None:
    paths = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
    assert len(paths) >= 5
    for path in paths:
        load_run(path)


def test_accepted_deepspeed_fields_are_deepspeeds() -> None:
    """Every name accepted at the top level is one that DeepSpeed's own code reads."""
    known = {value for name, value in vars(deepspeed_constants).items() if name.isupper() and isinstance(value, str)}
    package = Path(deepspeed_config.__file__).parents[1]
    read = " ".join(
        path.read_text()
        for folder in ("runtime", "monitor", "utils", "profiling", "comm")
        for path in package.glob(f"{folder}/**/*.py")
    )
    for field in DEEPSPEED_FIELDS:
        assert field in known or re.search(rf"['\"]{field}['\"]", read), field
