"""Test detection of weight formats, their metadata, and rejection of other models."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import clap_ds
from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.restore import tokenizer_problem
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import Checkpoint, save_transformers, to_safetensors, to_transformers
from clap_ds.weights.key_mapping import laion_names, to_names
from tests.weights.fake_checkpoints import checkpoint_of, flip_bit, save_safetensors

MICRO = load_preset("micro")


@pytest.fixture(scope="module")
def model() -> ClapModel:
    torch.manual_seed(4)
    return ClapModel(MICRO)


def assert_weights(found: Checkpoint, model: ClapModel) -> None:
    for name, parameter in model.named_parameters():
        if not name.startswith(("audio.tscam_conv", "audio.head")):
            assert torch.equal(found.state[name], parameter), name


def test_every_kind_loads_and_is_refused_for_another_model(
    model: ClapModel, tmp_path: Path
) -> None:
    # The same shapes, but other heads, which tensors don't show.
    heads = MICRO.model_copy(
        update={"audio": MICRO.audio.model_copy(update={"num_heads": [1, 4]}), "name": "heads"}
    )
    save_safetensors(model, tmp_path / "one.safetensors")
    save_transformers(model, tmp_path / "hf")
    path = checkpoint_of(model, tmp_path / "run", 5)
    for source in (tmp_path / "one.safetensors", tmp_path / "hf", path, str(tmp_path / "run")):
        for config in (MICRO, None):
            assert_weights(load_weights(source, config), model)
        with pytest.raises(
            ValueError, match=r"heads: audio.num_heads is \[2, 4\] there, \[1, 4\] here"
        ) as refusal:
            load_weights(source, heads)
        assert str(source) in str(refusal.value)
    with pytest.raises(
        ValueError,
        match=r"this run uses htsat_tiny_roberta_base: .*is 16 there, 64 .* and \d+ more",
    ):
        load_weights(path, load_preset("htsat_tiny_roberta_base"))
    torch.save(to_names(model.state_dict(), laion_names), tmp_path / "laion.pt")
    assert_weights(load_weights(tmp_path / "laion.pt"), model)


def test_checkpoints_of_other_versions_keep_their_sizes_whatever_a_preset_is_now(
    model: ClapModel, tmp_path: Path
) -> None:
    """Unknown fields in the manifest and in the run's settings are ignored."""
    named = ClapModel(MICRO.model_copy(update={"name": "htsat_tiny_roberta_base"}))
    named.load_state_dict(model.state_dict())
    settings = {
        "clap": {
            "train": {"shuffle_captions": True},
            "hardware": {"measure_peak": True},
            "context_length": 12,
        }
    }
    path = checkpoint_of(named, tmp_path, settings=settings)
    content = json.loads((path / "manifest.json").read_text()) | {"resumed_from": 7}
    content["hash"] = checkpoint_files._hash_json(
        {name: value for name, value in content.items() if name != "hash"}
    )
    (path / "manifest.json").write_text(json.dumps(content))
    for config in (None, MICRO):
        found = load_weights(tmp_path, config)
        assert_weights(found, model)
        assert (found.config.audio, found.config.joint_dim, found.context_length) == (
            MICRO.audio,
            MICRO.joint_dim,
            12,
        )


def test_what_is_damaged_or_no_weights_is_refused(model: ClapModel, tmp_path: Path) -> None:
    for name in ("weights.txt", "damaged.safetensors"):
        (tmp_path / name).write_text("none")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    theirs = {
        name: torch.zeros(1)
        for name in ("logit_scale", "audio.encoder.bn0.weight", "text.proj.0.weight")
    }
    save_file(theirs, tmp_path / "theirs.safetensors")
    torch.save(
        {"state_dict": {f"module.{name}": each for name, each in theirs.items()}},
        tmp_path / "theirs.pt",
    )
    flip_bit(checkpoint_of(model, tmp_path / "run") / "weights.safetensors", 9999)
    diverged = ClapModel(MICRO)
    torch.nn.init.constant_(diverged.text_projection.linear1.bias, float("nan"))
    diverged.audio.batch_norm.running_var[3] = float("inf")
    save_safetensors(diverged, tmp_path / "nan.safetensors")
    for name, reason in (
        ("nowhere", "no such file or folder"),
        (".", "no good checkpoint found"),
        ("run", r"weights\.safetensors has changed"),
        ("weights.txt", "expected a folder"),
        ("damaged.safetensors", "can't be read as safetensors"),
        ("foreign.safetensors", "this project"),
        ("theirs.safetensors", "open_clip"),
        ("theirs.pt", "open_clip"),
        ("nan.safetensors", r"NaN or infinity in 2 of \d+ tensors"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_weights(tmp_path / name)


def test_a_learned_bias_goes_with_the_sigmoid_loss_and_is_no_obstacle_without(
    tmp_path: Path,
) -> None:
    with_bias = ClapModel(MICRO, learns_bias=True)
    without = ClapModel(MICRO)
    with_bias.load_state_dict({"logit_bias": torch.full((1,), -3.5)}, strict=False)
    save_safetensors(with_bias, tmp_path / "sigmoid.safetensors")
    found = load_weights(tmp_path / "sigmoid.safetensors", MICRO)
    assert found.build().state_dict()["logit_bias"].item() == -3.5
    found.load_into(without)
    assert torch.equal(
        without.audio_projection.linear1.weight, with_bias.audio_projection.linear1.weight
    )
    assert "logit_bias" not in to_transformers(with_bias.state_dict())
    save_safetensors(without, tmp_path / "softmax.safetensors")
    other = load_weights(tmp_path / "softmax.safetensors")
    other.load_into(with_bias)
    assert with_bias.state_dict()["logit_bias"].item() == -3.5
    assert (found.loss_kind, other.loss_kind) == (
        "sigmoid",
        "softmax",
    )  # inferred from the bias without a manifest


def test_what_is_known_of_weights_comes_with_them(model: ClapModel, tmp_path: Path) -> None:
    settings = {"clap": {"context_length": 12, "loss": {"kind": "another"}}}
    best = {"metrics": {"zero_shot_top1": 0.25}, "best_metric": "zero_shot_top1"}
    told = checkpoint_of(model, tmp_path, 1, "roberta-base", settings=settings, **best)
    old = checkpoint_of(model, tmp_path, 1200, tokenizer="tokenizer")
    for path in (told, told / "weights.safetensors"):
        found = load_weights(path)
        assert (found.tokenizer, found.context_length, found.loss_kind) == (
            "roberta-base",
            12,
            "another",
        )
        assert found.shown == f"{path}, step 1, zero_shot_top1 0.25"
    for path in (tmp_path, old / "weights.safetensors"):
        found = load_weights(path)
        assert (found.tokenizer, found.context_length, found.loss_kind) == (
            str(old / "tokenizer"),
            None,
            "softmax",
        )
        assert found.shown == f"{old if path == tmp_path else path}, step 1,200"
    for tokens in (12, None):
        (tmp_path / "lone.safetensors").write_bytes(
            safetensors.torch.save(*to_safetensors(model.state_dict(), MICRO, tokens))
        )
        found = load_weights(tmp_path / "lone.safetensors", MICRO)
        assert (found.tokenizer, found.context_length, found.shown) == (
            None,
            tokens,
            str(tmp_path / "lone.safetensors"),
        )
    save_transformers(model, tmp_path / "hf")
    for limit, expected in (
        (12, 12),
        (64, None),
        (10**30, None),
        (1.5, None),
    ):  # MICRO has 64 positions
        (tmp_path / "hf" / "tokenizer_config.json").write_text(
            json.dumps({"model_max_length": limit})
        )
        found = load_weights(tmp_path / "hf")
        assert (found.tokenizer, found.context_length) == (str(tmp_path / "hf"), expected)


@pytest.mark.parametrize(
    "clap",
    [3, {"loss": [1], "context_length": "12"}, {"loss": {"kind": {}}, "context_length": True}],
)
def test_settings_of_wrong_types_count_as_unknown(
    model: ClapModel, tmp_path: Path, clap: Any
) -> None:
    found = load_weights(checkpoint_of(model, tmp_path, settings={"clap": clap}))
    assert (found.loss_kind, found.longest_caption) == ("softmax", MICRO.text.max_tokens)


@pytest.mark.parametrize("name", ["/etc", "some/one", "open_clip:local-dir:/tmp"])
def test_a_file_names_no_place_of_its_choice(
    model: ClapModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It may name what is built in, or what this host's cache has. The user may choose any."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--one--cached").mkdir(parents=True)
    for known in ("roberta-base", "one/cached", "open_clip:CLAP-HTSAT-tiny"):
        assert (
            load_weights(checkpoint_of(model, tmp_path / "known", 1, known)).tokenizer_name == known
        )
    found = load_weights(checkpoint_of(model, tmp_path / "named", 1, name))
    with pytest.raises(ValueError, match=rf"pass --tokenizer {name}"):
        found.tokenizer_name  # noqa: B018
    clap = clap_ds.load(found.path)  # which embeds audio
    with pytest.raises(ValueError, match="pass --tokenizer"):
        clap.embed_text("a dog")
    assert "can't be compared" in str(
        tokenizer_problem(name, "roberta-base", MICRO.text, is_trusted=False)
    )
    ours = MICRO.model_copy(update={"text": MICRO.text.model_copy(update={"hub_name": name})})
    assert load_weights(checkpoint_of(model, tmp_path / "unnamed"), ours).tokenizer_name == name
    if name.startswith("open_clip:"):
        other = ClapModel(MICRO.model_copy(update={"name": name}))
        save_safetensors(other, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=rf"pass --preset {name}"):
            load_weights(tmp_path / "other.safetensors")
