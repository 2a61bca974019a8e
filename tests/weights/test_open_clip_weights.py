"""Test reading and writing open_clip's models. `results/open_clip/parity.md` compares embeddings with
open_clip's own."""

import hashlib
import json
import sys
import types

import pytest
import torch

from clap_ds.checkpoint import export
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights import open_clip_weights
from clap_ds.weights.hub import train_tokenizer
from tests.checkpoint.test_export import MICRO, random_model
from tests.weights.fake_checkpoints import checkpoint_of

NAMED = MICRO.model_copy(
    update={"text": MICRO.text.model_copy(update={"hub_name": "roberta-base"})}
)
FUSED = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})


@pytest.mark.parametrize(
    ("preset", "digest"),  # of the models of open_clip at commit 89fb801f, as below
    [
        ("clap_htsat_tiny_roberta_base_fused", "931afab34ffe2b95"),
        ("htsat_base_roberta_base", "ca70a93363981b21"),
    ],
)
def test_names_shapes_and_dtypes_equal_open_clips(preset, digest):
    with torch.device("meta"):
        state = open_clip_weights.to_open_clip(ClapModel(load_preset(preset)))
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()]
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("preset", "variant", "projection", "pooler"),
    [
        ("clap_htsat_tiny_roberta_base_fused", "tiny", "clap_mlp", "cls_pooler"),
        ("htsat_large_roberta_base", "large", "mlp", "mean_pooler"),
    ],
)
def test_sizes_have_open_clips_fields(preset, variant, projection, pooler):
    config = load_preset(preset)
    sizes = open_clip_weights.model_cfg(config, 77)
    audio = {"model_name": variant, "hop_size": 480, "enable_fusion": preset.endswith("fused")}
    text = {"hf_model_name": "roberta-base", "hf_proj_type": projection, "hf_pooler_type": pooler}
    assert sizes["embed_dim"] == config.joint_dim
    assert sizes["audio_cfg"].items() >= audio.items()
    assert sizes["text_cfg"].items() >= text.items()


def test_model_that_open_clip_lacks_is_rejected_with_all_reasons():
    reasons = r"demo .*not HTSAT-tiny.*; its text projection .*; .* no hub_name"
    with pytest.raises(ValueError, match=reasons):
        open_clip_weights.model_cfg(load_preset("demo"), 77)


@pytest.mark.parametrize("learns_bias", [False, True])
def test_exported_folder_loads_unchanged(learns_bias, tmp_path, monkeypatch):
    variants = {"micro": (MICRO.audio.embed_dim, MICRO.audio.depths)}
    monkeypatch.setattr(open_clip_weights, "_VARIANTS", variants)
    monkeypatch.setattr(open_clip_weights, "_FIXED", {})
    model = random_model(NAMED, learns_bias=learns_bias)
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(["a dog barks"] * 20, tokenizer, vocab_size=300)
    settings = {"clap": {"context_length": 12}}
    path = checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer, settings=settings)
    folder = tmp_path / "out"
    export.main([str(path), str(folder), "--format", "open_clip"])
    sizes = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    assert (sizes["text_cfg"]["context_length"], "init_logit_bias" in sizes) == (12, learns_bias)
    # As open_clip's training saves it.
    state = open_clip_weights.to_open_clip(model)
    parallel = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "optimizer": {}, "state_dict": parallel}, tmp_path / "epoch_3.pt")
    expected = model.state_dict()
    del expected["logit_scale_text"]
    for source in (folder, tmp_path / "epoch_3.pt"):
        loaded = load_weights(source)
        assert (loaded.config, loaded.loss_kind) == (MICRO, "sigmoid" if learns_bias else "softmax")
        # Only the folder has a tokenizer and a length. LAION's 77 are more than 64 positions.
        tokenizer_and_length = (str(source), 12) if source == folder else (None, 64)
        assert (loaded.tokenizer, loaded.longest_caption) == tokenizer_and_length
        torch.testing.assert_close(loaded.state, dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("config", [MICRO, FUSED], ids=["plain", "with fusion"])
def test_htsats_own_weights_start_an_audio_tower(config, tmp_path, monkeypatch):
    source = random_model()
    htsat = {}
    for name, tensor in open_clip_weights.to_open_clip(source).items():
        if name.startswith("audio.encoder."):
            htsat[name.replace("audio.encoder.", "sed_model.")] = tensor
    # Its training pickles an object of a package that isn't installed.
    lightning = types.ModuleType("pytorch_lightning")
    lightning.ModelCheckpoint = type("ModelCheckpoint", (), {"__module__": lightning.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, lightning.__name__, lightning)
    callbacks = {lightning.ModelCheckpoint: {"best": 0.4}}
    path = tmp_path / "htsat.ckpt"
    torch.save({"callbacks": callbacks, "state_dict": htsat}, path)
    model = ClapModel(config)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in source.state_dict().items():
        if name.startswith("audio."):
            expected[name] = tensor
    load_weights(path, config).load_into(model)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"htsat\.ckpt contains only an audio tower"):
        load_weights(path).build()
