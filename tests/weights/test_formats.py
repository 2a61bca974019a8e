"""Checkpoints in and out: exact round trips, HF's own reading of what is written, refusals that say what is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import (
    load_safetensors,
    load_transformers,
    save_safetensors,
    save_transformers,
)
from clap_ds.weights.hf_config import config_from_transformers, not_expressible
from tests.model.reference_clap import MICRO_AUDIO, MICRO_TEXT, REFERENCES, randomise

import transformers  # isort: skip

MICRO = load_preset("micro")


def random_model(config: ClapConfig = MICRO) -> ClapModel:
    model = ClapModel(config).eval()
    randomise(model.state_dict(), 0)
    model.logit_scale_text.copy_(model.logit_scale.detach())
    model.audio.batch_norm.num_batches_tracked.fill_(17)
    return model


def reference_state(seed: int = 0) -> dict[str, Tensor]:
    reference = REFERENCES["micro"]()
    randomise(reference.named(), seed)
    return {name: tensor.detach().clone() for name, tensor in reference.named().items()}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, same names."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def without_classifier(model: ClapModel) -> dict[str, Tensor]:
    """What HF's CLAP has, too."""
    held = ("audio.tscam_conv.", "audio.head.")
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(held)}


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A micro `transformers.ClapModel` as HF itself saves it, with HF's text epsilon of 1e-12."""
    config = transformers.ClapConfig(audio_config=MICRO_AUDIO, text_config=MICRO_TEXT, projection_dim=32)
    model = transformers.ClapModel(config)
    randomise(model.state_dict(), 5)
    model.save_pretrained(tmp_path / "hf")
    front_end: dict[str, Any] = {"feature_size": 16, "max_length_s": 1, "frequency_min": 50, "truncation": "rand_trunc"}
    transformers.ClapFeatureExtractor(**front_end).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_transformers_to_ours_and_back_is_exact(hf_folder: Path, tmp_path: Path) -> None:
    model = load_transformers(hf_folder).build()
    save_transformers(model, tmp_path / "back")
    there, back = (load_file(folder / "model.safetensors") for folder in (hf_folder, tmp_path / "back"))
    assert_same(back, {**there, "logit_scale_t": there["logit_scale_a"]})  # the one that is trained here
    assert model.config.audio == MICRO.audio
    assert model.config.text.layer_norm_eps == 1e-12
    transformers.ClapModel.from_pretrained(hf_folder).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    shutil.copy(hf_folder / "preprocessor_config.json", tmp_path / "sharded")
    assert_same(load_transformers(tmp_path / "sharded").state, load_transformers(hf_folder).state)


def test_ours_to_transformers_and_back_is_exact(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model().to(dtype)
        save_transformers(model, tmp_path)
        again = load_transformers(tmp_path).build().to(dtype)
        assert_same(without_classifier(again), without_classifier(model))
        assert again.config.model_dump(exclude={"name", "text"}) == MICRO.model_dump(exclude={"name", "text"})


def test_what_does_not_fit_is_refused_and_listed(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    torch.save(reference_state(), hf_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not read"):
        load_transformers(hf_folder)
    fields = json.loads((hf_folder / "config.json").read_text())
    for section, changes, reason in (
        ("audio_config", {"enable_fusion": True}, "audio_config.enable_fusion is True, only False is supported"),
        ("audio_config", {"patch_stride": [2, 2]}, "audio_config.patch_stride is 2, only 4 is supported"),
        ("audio_config", {"patch_size": [4, 2]}, r"patches must be square, got \[4, 2\]"),
        ("audio_config", {"mlp_ratio": 3.5}, "audio_config.mlp_ratio is 3.5, only 4 is supported"),
        ("text_config", {"pad_token_id": 0}, "text_config.pad_token_id is 0, only 1 is supported"),
        (
            None,
            {"projection_hidden_act": "silu"},
            "projection_hidden_act is 'silu', only 'relu' or 'gelu' is supported",
        ),
        (None, {"model_type": "bert"}, "config.json is of model_type 'bert', expected 'clap'"),
    ):
        changed = {**fields, section: {**fields[section], **changes}} if section else {**fields, **changes}
        (hf_folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=reason):
            load_transformers(hf_folder)
    state, key = reference_state(), "audio_model.audio_encoder.layers.0.blocks.1.attention.self.key.weight"
    with pytest.raises(ValueError, match=r"doesn't fit htsat_tiny_roberta_base. missing: .* and \d+ more"):
        load_transformers(state, load_preset("htsat_tiny_roberta_base"))
    with pytest.raises(ValueError, match="feature fusion"):
        load_transformers({**state, "audio_model.audio_encoder.patch_embed.mel_conv2d.weight": torch.zeros(1)}, MICRO)
    del state[key]
    state |= {"surplus.weight": torch.zeros(2), "audio_projection.linear2.bias": torch.zeros(31)}
    listed = (
        rf"missing: {key}\. unexpected: surplus\.weight\. .*audio_projection\.linear2\.bias \(31,\) instead of \(32,\)"
    )
    with pytest.raises(ValueError, match=listed):
        load_transformers(state, MICRO)


def test_own_safetensors_carry_any_model_whole(tmp_path: Path) -> None:
    mean = MICRO.model_copy(update={"name": "other", "text": MICRO.text.model_copy(update={"pooling": "mean"})})
    for config in (mean, MICRO):
        model = random_model(config)
        save_safetensors(model, tmp_path / "deeper" / "clap.safetensors")
        checkpoint = load_safetensors(tmp_path / "deeper" / "clap.safetensors")
        assert checkpoint.config == config
        assert_same(checkpoint.build().state_dict(), model.state_dict())
    with pytest.raises(ValueError, match=r"doesn't fit other\. unexpected: text\.roberta\.pooler"):
        checkpoint.load_into(ClapModel(mean))


def test_models_that_transformers_cannot_express_are_refused_with_every_reason(tmp_path: Path) -> None:
    gelu = MICRO.text.projection.model_copy(update={"activation": "gelu"})
    audio = MICRO.audio.model_copy(update={"depths": [2, 1, 1], "num_heads": [2, 4, 4], "num_samples": 47999})
    other = MICRO.model_copy(update={"audio": audio, "text": MICRO.text.model_copy(update={"projection": gelu})})
    with pytest.raises(ValueError, match=r"can't be a transformers\.ClapModel") as refusal:
        save_transformers(ClapModel(other), tmp_path / "never")
    assert all(reason in str(refusal.value) for reason in ("different activations", "grid (4)", "not whole seconds"))
    assert not (tmp_path / "never").exists()
    assert not any(not_expressible(load_preset(name)) for name in preset_names())


def test_the_published_layouts_have_configurations() -> None:
    """HF's defaults are the tiny model; larger_clap checkpoints are HTSAT-base with a joint space of 512."""
    tiny, preset = config_from_transformers(transformers.ClapConfig()), load_preset("htsat_tiny_roberta_base")
    assert (tiny.audio, tiny.joint_dim) == (preset.audio, preset.joint_dim)
    assert tiny.text == preset.text.model_copy(update={"layer_norm_eps": 1e-12})
    sizes = {"patch_embeds_hidden_size": 128, "depths": [2, 2, 12, 2], "hidden_size": 1024}
    larger = config_from_transformers(transformers.ClapConfig(audio_config=sizes))
    base = load_preset("htsat_base_roberta_base").audio
    assert larger.audio == base.model_copy(update={"projection": larger.audio.projection})
    assert larger.audio.projection.hidden_dim == larger.joint_dim == 512
