"""Weights of every format are detected and loaded with their metadata, and other models rejected."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.restore import tokenizer_problem
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import Checkpoint, save_transformers
from tests.weights.fake_checkpoints import checkpoint_of, save_safetensors

MICRO = load_preset("micro")


@pytest.fixture(scope="module")
def model() -> ClapModel:
    torch.manual_seed(4)
    return ClapModel(MICRO)


def assert_weights(weights: Checkpoint, model: ClapModel) -> None:
    for name, parameter in model.named_parameters():
        # transformers and LAION have no classifier.
        if not name.startswith(("audio.tscam_conv", "audio.head")):
            assert torch.equal(weights.state[name], parameter), name


@pytest.fixture(scope="module")
def sources(model: ClapModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in all formats."""
    folder = tmp_path_factory.mktemp("weights")
    save_safetensors(model, folder / "model.safetensors")
    save_transformers(model, folder / "transformers")
    checkpoint = checkpoint_of(model, folder / "run", 5)
    return {
        "file": folder / "model.safetensors",
        "transformers": folder / "transformers",
        "checkpoint": checkpoint,
        "run": folder / "run",
    }


@pytest.mark.parametrize("source", ["file", "transformers", "checkpoint", "run"])
def test_weights_with_sizes_are_rejected_for_another_model(sources, model, source):
    assert_weights(load_weights(sources[source]), model)
    # The same shapes, but other heads, which tensors don't show.
    audio = MICRO.audio.model_copy(update={"num_heads": [1, 4]})
    heads = MICRO.model_copy(update={"audio": audio, "name": "heads"})
    with pytest.raises(ValueError, match=r"audio.num_heads is \[2, 4\] there, \[1, 4\] here"):
        load_weights(sources[source], heads)


def test_checkpoint_of_other_version_keeps_sizes(model, tmp_path):
    """Unknown fields in the manifest and in the run's settings are ignored."""
    clap = {"train": {"shuffle_captions": True}, "context_length": 12}
    path = checkpoint_of(model, tmp_path, settings={"clap": clap})
    content = json.loads((path / "manifest.json").read_text())
    del content["hash"]
    content["resumed_from"] = 7
    content["hash"] = checkpoint_files._hash_json(content)
    (path / "manifest.json").write_text(json.dumps(content))
    weights = load_weights(tmp_path)
    assert_weights(weights, model)
    assert weights.context_length == 12


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name in ("weights.txt", "damaged.safetensors"):
        (folder / name).write_text("none")
    save_file({"a": torch.zeros(1)}, folder / "foreign.safetensors")
    names = ("logit_scale", "audio.encoder.bn0.weight", "text.proj.0.weight")
    open_clip = {name: torch.zeros(1) for name in names}
    save_file(open_clip, folder / "open_clip.safetensors")
    diverged = ClapModel(MICRO)
    diverged.audio.batch_norm.running_var[3] = float("inf")
    save_safetensors(diverged, folder / "nan.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "no such file or folder"),
        (".", "no good checkpoint found"),
        ("weights.txt", "expected a folder"),
        ("damaged.safetensors", "can't be read as safetensors"),
        ("foreign.safetensors", "this project"),
        ("open_clip.safetensors", "open_clip"),
        ("nan.safetensors", r"NaN or infinity in 1 of \d+ tensors"),
    ],
)
def test_bad_file_is_rejected_with_reason(bad_files, name, reason):
    with pytest.raises(ValueError, match=reason):
        load_weights(bad_files / name)


def test_learned_bias_shows_sigmoid_loss_and_fits_model_without(tmp_path):
    with_bias = ClapModel(MICRO, learns_bias=True)
    without = ClapModel(MICRO)
    with_bias.load_state_dict({"logit_bias": torch.full((1,), -3.5)}, strict=False)
    save_safetensors(with_bias, tmp_path / "sigmoid.safetensors")
    sigmoid = load_weights(tmp_path / "sigmoid.safetensors", MICRO)
    assert sigmoid.loss_kind == "sigmoid"
    assert sigmoid.build().state_dict()["logit_bias"].item() == -3.5
    sigmoid.load_into(without)


def test_manifest_describes_weights(model, tmp_path):
    checkpoint = checkpoint_of(
        model,
        tmp_path,
        tokenizer="roberta-base",
        settings={"clap": {"context_length": 12, "loss": {"kind": "another"}}},
        metrics={"zero_shot_top1": 0.25},
        best_metric="zero_shot_top1",
    )
    weights = load_weights(checkpoint)
    assert (weights.tokenizer, weights.context_length) == ("roberta-base", 12)
    assert weights.loss_kind == "another"
    assert weights.description == f"{checkpoint}, step 1, zero_shot_top1 0.25"


@pytest.mark.parametrize("clap", [3, {"loss": {"kind": {}}, "context_length": True}])
def test_wrong_settings_count_as_unknown(model, tmp_path, clap):
    checkpoint_of(model, tmp_path, 1200, settings={"clap": clap})
    weights = load_weights(tmp_path)
    assert (weights.loss_kind, weights.longest_caption) == ("softmax", MICRO.text.max_tokens)


# The model has 64 positions.
@pytest.mark.parametrize(("limit", "expected"), [(12, 12), (10**30, None), (1.5, None)])
def test_transformers_folder_has_tokenizer_and_limit(model, tmp_path, limit, expected):
    save_transformers(model, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    weights = load_weights(tmp_path / "hf")
    assert (weights.tokenizer, weights.context_length) == (str(tmp_path / "hf"), expected)


@pytest.mark.parametrize("name", ["/etc", "some/one", "open_clip:local-dir:/tmp"])
def test_file_may_not_name_other_tokenizer_or_model(model, tmp_path, name):
    """Only the user may name any path or repository."""
    weights = load_weights(checkpoint_of(model, tmp_path / "named", tokenizer=name))
    with pytest.raises(ValueError, match=rf"pass --tokenizer {name}"):
        weights.tokenizer_name  # noqa: B018
    problem = tokenizer_problem(name, "roberta-base", MICRO.text, is_trusted=False)
    assert "can't be compared" in str(problem)
    if name.startswith("open_clip:"):
        named = ClapModel(MICRO.model_copy(update={"name": name}))
        save_safetensors(named, tmp_path / "named.safetensors")
        with pytest.raises(ValueError, match=rf"pass --preset {name}"):
            load_weights(tmp_path / "named.safetensors")
