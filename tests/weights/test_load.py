"""Weights are told apart by what lies at the path, and of another model refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import Checkpoint, save_safetensors, save_transformers, to_safetensors, to_transformers
from clap_ds.weights.load import load_weights, locate, loss_kind_of, taken, text_tokens_of, tokenizer_of
from clap_ds.weights.names import laion_names, to_names
from tests.weights.fake_checkpoints import checkpoint_of, flip_bit, make_checkpoint

MICRO = load_preset("micro")


@pytest.fixture(scope="module")
def model() -> ClapModel:
    torch.manual_seed(4)
    return ClapModel(MICRO)


def assert_weights(found: Checkpoint, model: ClapModel) -> None:
    for name, parameter in model.named_parameters():
        if not name.startswith(("audio.tscam_conv", "audio.head")):
            assert torch.equal(found.state[name], parameter), name


def test_every_kind_loads_and_is_refused_for_another_model(model: ClapModel, tmp_path: Path) -> None:
    # The same shapes, but other heads: no tensor would show it.
    heads = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"num_heads": [1, 4]}), "name": "heads"})
    save_safetensors(model, tmp_path / "one.safetensors")
    save_transformers(model, tmp_path / "hf")
    path = checkpoint_of(model, tmp_path / "run", 5)
    for source in (tmp_path / "one.safetensors", tmp_path / "hf", path, str(tmp_path / "run")):
        for config in (MICRO, None):
            assert_weights(load_weights(source, config), model)
        with pytest.raises(ValueError, match=r"has heads: audio.num_heads is \[2, 4\] there, \[1, 4\] here") as refusal:
            load_weights(source, heads)
        assert str(source) in str(refusal.value)
    with pytest.raises(
        ValueError, match=r"this run has htsat_tiny_roberta_base: .*is 16 there, 64 here.* and \d+ more"
    ):
        load_weights(path, load_preset("htsat_tiny_roberta_base"))
    torch.save(to_names(model.state_dict(), laion_names), tmp_path / "laion.pt")
    for config in (MICRO, None):
        assert_weights(load_weights(tmp_path / "laion.pt", config), model)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    diverged = ClapModel(MICRO)
    torch.nn.init.constant_(diverged.text_projection.linear1.bias, float("nan"))
    diverged.audio.batch_norm.running_var[3] = float("inf")
    save_safetensors(diverged, tmp_path / "one.safetensors")
    wrong = r"audio\.batch_norm\.running_var, text_projection\.linear1\.bias"
    with pytest.raises(ValueError, match=rf"NaN or infinity in 2 of \d+ tensors \({wrong}\): .*earlier checkpoint"):
        load_weights(tmp_path / "one.safetensors", MICRO)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    for name in ("weights.txt", "damaged.safetensors"):
        (tmp_path / name).write_text("none")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    for name, reason in (
        ("nowhere", "no such file or folder"),
        (".", r"no good checkpoint here.*no config\.json"),
        ("weights.txt", r"weights\.txt: expected a \.safetensors file"),
        ("damaged.safetensors", "can't be read as safetensors"),
        ("foreign.safetensors", "metadata; only files of save_safetensors do"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_weights(tmp_path / name)


def test_a_learned_bias_goes_with_the_sigmoid_loss_and_is_no_obstacle_without(tmp_path: Path) -> None:
    with_bias, without = ClapModel(MICRO, learns_bias=True), ClapModel(MICRO)
    with_bias.load_state_dict({"logit_bias": torch.full((1,), -3.5)}, strict=False)
    save_safetensors(with_bias, tmp_path / "sigmoid.safetensors")
    found = load_weights(tmp_path / "sigmoid.safetensors", MICRO)
    assert found.build().state_dict()["logit_bias"].item() == -3.5
    found.load_into(without)
    assert torch.equal(without.audio_projection.linear1.weight, with_bias.audio_projection.linear1.weight)
    assert "logit_bias" not in to_transformers(with_bias.state_dict())
    save_safetensors(without, tmp_path / "softmax.safetensors")
    load_weights(tmp_path / "softmax.safetensors").load_into(with_bias)
    assert with_bias.state_dict()["logit_bias"].item() == -3.5
    kinds = [loss_kind_of(path, load_weights(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert kinds == ["sigmoid", "softmax"]  # by the bias, as of checkpoints from before they said
    saved = checkpoint_of(without, tmp_path, settings={"clap": {"loss": {"kind": "another"}}})
    assert loss_kind_of(saved, load_weights(saved)) == "another"


def test_of_a_folder_the_best_good_one_is_taken_where_it_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(ValueError, match=f"which checkpoint is best can't be told: {why}; give"):
            locate(folder, best=True)

    top1: dict[str, Any] = {"best_by": "zero_shot_top1"}
    make_checkpoint(tmp_path, 1, **top1)
    refused(tmp_path, "none that is whole was evaluated by zero_shot_top1")
    good, best = (make_checkpoint(tmp_path, step, metrics={"zero_shot_top1": step / 10}, **top1) for step in (2, 3))
    newest = make_checkpoint(tmp_path, 4, metrics={"zero_shot_top1": 0.1, "retrieval_loss": 1}, **top1)
    assert (locate(tmp_path, best=True), locate(tmp_path)) == (best, newest)
    assert taken(best) == f"{best}, step 3, zero_shot_top1 0.3"
    flip_bit(best / "weights.safetensors", 99)
    assert locate(tmp_path, best=True) == good
    assert "passed over" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"weights\.safetensors has changed"):
        load_weights(best)
    make_checkpoint(tmp_path, 5, metrics={"retrieval_loss": 2}, best_by="retrieval_loss")
    refused(tmp_path, "they name retrieval_loss and zero_shot_top1 to tell it by")
    refused(newest, "this isn't a folder of checkpoints")
    make_checkpoint(tmp_path / "old", 1, metrics={"zero_shot_top1": 1})
    refused(tmp_path / "old", "they name no metric to tell it by")
    for step in (1, 2):
        make_checkpoint(tmp_path / "loss", step, metrics={"retrieval_loss": float(step)}, best_by="retrieval_loss")
    assert locate(tmp_path / "loss", best=True).name == "step-00000001"  # the smaller loss


def test_tokenizer_and_trained_caption_length_are_known_wherever_weights_come_from(
    model: ClapModel, tmp_path: Path
) -> None:
    told = checkpoint_of(model, tmp_path, 1, "roberta-base", settings={"clap": {"text_tokens": 12}})
    old = checkpoint_of(model, tmp_path, 2, tokenizer="tokenizer")
    assert [text_tokens_of(path, MICRO) for path in (told, told / "weights.safetensors", old)] == [12, 12, None]
    assert [tokenizer_of(path) for path in (told, tmp_path)] == ["roberta-base", None]
    assert tokenizer_of(old / "weights.safetensors") == str(old / "tokenizer")
    for tokens in (12, None):
        (tmp_path / "lone.safetensors").write_bytes(to_safetensors(model.state_dict(), MICRO, tokens))
        assert text_tokens_of(tmp_path / "lone.safetensors", MICRO) == tokens
    (beside := tmp_path / "hf").mkdir()
    for limit, expected in ((12, 12), (64, None), (10**30, None), (1.5, None)):  # MICRO has 64 positions
        (beside / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert (text_tokens_of(beside, MICRO), tokenizer_of(beside)) == (expected, str(beside))
