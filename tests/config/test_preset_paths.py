"""Sizes of a model by path: a preset of one's own, a ClapModel's config.json; what is wrong with one is said in a line."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset, preset_argument
from clap_ds.config.settings import load_run

MICRO = load_preset("micro")
SIZES: dict[str, Any] = MICRO.model_dump(mode="json", exclude={"name"})
CLAP = {
    "model_type": "clap",
    "projection_dim": 32,
    "audio_config": {"patch_embeds_hidden_size": 16, "depths": [2, 1], "num_attention_heads": [2, 4], "spec_size": 64,
                     "num_mel_bins": 16, "num_classes": 7},
    "text_config": {"vocab_size": 512, "max_position_embeddings": 66, "hidden_size": 32, "num_hidden_layers": 2,
                    "num_attention_heads": 2, "intermediate_size": 64, "layer_norm_eps": 1e-5},
}  # fmt: skip


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**SIZES, section: {**SIZES[section], **fields}}


def test_a_presets_json_and_a_clap_models_folder_give_their_sizes(tmp_path: Path) -> None:
    (own := tmp_path / "own.json").write_text(json.dumps(SIZES))
    assert load_preset(str(own)) == MICRO.model_copy(update={"name": "own"})
    (folder := tmp_path / "my_clap").mkdir()
    (folder / "config.json").write_text(json.dumps(CLAP))
    (folder / "preprocessor_config.json").write_text('{"max_length_s": 1}')
    for path in (folder, folder / "config.json"):
        assert load_preset(str(path)) == MICRO.model_copy(update={"name": "my_clap"})


def test_a_run_keeps_the_sizes_where_the_file_is_gone(write_run: Callable[..., Path], tmp_path: Path) -> None:
    own, again = tmp_path / "own.json", tmp_path / "config.json"
    own.write_text(json.dumps(changed("text", num_layers=3)))
    run = load_run(write_run(clap={"model": {"preset": str(own)}}))
    own.unlink()
    again.write_text(json.dumps(run.resolved()))
    assert run.clap.preset().text.num_layers == load_run(again).clap.preset().text.num_layers == 3
    assert (load_run(again).clap, run.clap.preset().name) == (run.clap, "own")
    by_name, folder = load_run(write_run()).checkpoint_folder, run.checkpoint_folder
    assert load_run(again).checkpoint_folder.name.split("-")[1] == folder.name.split("-")[1]
    assert folder != by_name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no preset 'PATH'; there are demo, .*; or the path of a preset's JSON"),
        ("{", "own.json:1:2: not valid JSON"),
        ({}, "audio: Field required; text: Field required; joint_dim: Field required"),
        (changed("audio", embed_dm=8), r"audio\.embed_dm: no such field; did you mean 'embed_dim'\?"),
        (changed("audio", num_heads=[3, 4]), "audio: stage 0: 16 channels don't divide into 3 heads"),
        (changed("text", num_heads=3), "text: hidden_size 32 doesn't divide into num_heads 3"),
        (changed("text", architecture="gpt2"), "text.architecture: expected 'roberta', 'bert' or 'mpnet'"),
        (changed("text", max_positions=3), "text: max_positions 3 leaves positions for 1 tokens"),
        ({"model_type": "bert"}, "config.json is of model_type 'bert', expected 'clap'"),
        ({**CLAP, "projection_dim": "32"}, "expected a valid integer"),
        ({**CLAP, "audio_config": [1]}, "own.json: can't be read: "),
        ({**CLAP, "text_config": {"hidden_act": "relu"}}, "own.json: text_config.hidden_act is 'relu', only 'gelu'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    content: Any, message: str, write_run: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    for load in (load_preset, preset_argument):
        with pytest.raises((ValueError, argparse.ArgumentTypeError), match=message.replace("PATH", str(path))) as found:
            load(str(path))
        assert "\n" not in str(found.value)
    run = write_run(clap={"model": {"preset": str(path)}})
    with pytest.raises(UserError, match=r"run\.json: clap\.model\.preset: ") as refusal:
        load_run(run)
    assert "\n" not in str(refusal.value)


def test_mpnet_runs_padded_and_keeps_its_activations(write_run: Callable[..., Path]) -> None:
    model = {"preset": {**changed("text", architecture="mpnet"), "name": "mine"}}
    assert load_run(write_run(clap={"model": model})).clap.preset().name == "mine"
    for clap, message in (
        ({"model": model, "text": "packed"}, r"clap\.text: mpnet's attention .*expected 'padded'"),
        ({"model": {**model, "checkpoint_activations": ["text"]}}, r"clap\.model\.checkpoint_activations: .*mpnet"),
    ):
        with pytest.raises(UserError, match=message):
            load_run(write_run(clap=clap))
