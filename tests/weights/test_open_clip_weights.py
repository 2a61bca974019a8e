"""Test reading and writing open_clip's models. `results/open_clip/parity.md` compares embeddings with
open_clip's own."""

import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clap_ds.checkpoint import export
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import ClapConfig, load_preset
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
        ("clap_htsat_tiny_roberta_base", "b02d657e547afa24"),
        ("clap_htsat_tiny_roberta_base_fused", "931afab34ffe2b95"),
        ("htsat_base_roberta_base", "ca70a93363981b21"),
        ("htsat_tiny_roberta_base", "e017a8d02a9be1c1"),
    ],
)
def test_names_shapes_and_types_are_open_clips(preset: str, digest: str) -> None:
    with torch.device("meta"):
        model = ClapModel(load_preset(preset))
    lines = [
        f"{name} {tuple(each.shape)} {each.dtype}"
        for name, each in open_clip_weights.to_open_clip(model).items()
    ]
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] == digest


def test_exported_front_end_is_ours() -> None:
    """open_clip loads its front end's filters from the file."""
    model = ClapModel(MICRO)
    waveform = torch.randn(1, 48000) / 10
    parts = {
        name.rpartition("extractor.")[2]: each
        for name, each in open_clip_weights.to_open_clip(model).items()
    }
    padded = F.pad(waveform, (512, 512), mode="reflect")[:, None]
    real, imaginary = (
        F.conv1d(padded, parts[f"stft.conv_{part}.weight"], stride=480) for part in ("real", "imag")
    )
    power_BTF = (real.square() + imaginary.square()).transpose(1, 2) @ parts["melW"]
    torch.testing.assert_close(
        10 * power_BTF.clamp(min=1e-10).log10(), model.mel(waveform), atol=1e-3, rtol=0
    )


def test_sizes_are_in_open_clips_words() -> None:
    found = open_clip_weights.model_cfg(load_preset("clap_htsat_tiny_roberta_base_fused"), 77)
    audio = found.pop("audio_cfg")
    text = found.pop("text_cfg")
    assert found == {"embed_dim": 512}
    expected: dict[str, Any] = {
        "model_name": "tiny",
        "clip_samples": 480000,
        "hop_size": 480,
        "proj_act": "relu",
    }
    assert (
        audio.items() >= (expected | {"enable_fusion": True, "fmin": 50, "class_num": 527}).items()
    )
    expected = {
        "hf_model_name": "roberta-base",
        "hf_pooler_type": "cls_pooler",
        "hf_proj_type": "clap_mlp",
    }
    assert text.items() >= expected.items()
    for size in ("tiny", "base", "large"):
        found = open_clip_weights.model_cfg(load_preset(f"htsat_{size}_roberta_base"), 77)
        assert found["audio_cfg"]["model_name"] == size
        assert (found["text_cfg"]["hf_pooler_type"], found["text_cfg"]["hf_proj_type"]) == (
            "mean_pooler",
            "mlp",
        )
    with pytest.raises(
        ValueError, match=r"demo .*not HTSAT-tiny.*; its text projection .*; .* no hub_name"
    ):
        open_clip_weights.model_cfg(load_preset("demo"), 77)


@pytest.mark.parametrize("learns_bias", [False, True])
def test_an_exported_folder_loads_as_it_was(
    learns_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        open_clip_weights, "_VARIANTS", {"micro": (MICRO.audio.embed_dim, MICRO.audio.depths)}
    )
    monkeypatch.setattr(open_clip_weights, "_FIXED", {})
    model = random_model(NAMED, learns_bias=learns_bias)
    settings = {"clap": {"context_length": 12}}
    train_tokenizer(["a dog barks"] * 20, tokenizer := tmp_path / "tokenizer", vocab_size=300)
    path = checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer, settings=settings)
    export.main([str(path), str(tmp_path / "out"), "--format", "open_clip"])
    sizes = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    assert (sizes["text_cfg"]["context_length"], "init_logit_bias" in sizes) == (12, learns_bias)
    file = tmp_path / "out" / "open_clip_model.safetensors"
    state = open_clip_weights.to_open_clip(model)
    metadata = {"epoch": 3, "optimizer": {}}
    assert state["logit_scale"].shape == ()
    torch.save(
        {**metadata, "state_dict": {f"module.{name}": each for name, each in state.items()}},
        tmp_path / "epoch_3.pt",
    )
    for source in (tmp_path / "out", file, tmp_path / "epoch_3.pt"):
        found = load_weights(source)
        assert (found.config, found.loss_kind) == (MICRO, "sigmoid" if learns_bias else "softmax")
        assert found.tokenizer == (str(source) if source.is_dir() else None)
        assert found.longest_caption == (
            12 if source.is_dir() else 64
        )  # of 64 positions; LAION's 77 are more
        own = model.state_dict()
        assert found.state.keys() == own.keys() - {"logit_scale_text"}
        assert all(torch.equal(each, own[name]) for name, each in found.state.items())
        found.build(learns_bias=False)


@pytest.mark.parametrize("config", [MICRO, FUSED], ids=["plain", "with fusion"])
def test_htsats_own_weights_start_an_audio_tower(
    config: ClapConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_model()
    started = ClapModel(config)
    theirs = {
        name.replace("audio.encoder.", "sed_model."): t
        for name, t in open_clip_weights.to_open_clip(source).items()
    }
    lightning = types.ModuleType("pytorch_lightning")
    lightning.ModelCheckpoint = type("ModelCheckpoint", (), {"__module__": lightning.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, lightning.__name__, lightning)
    content = {name: tensor for name, tensor in theirs.items() if name.startswith("sed_model.")}
    callbacks = {lightning.ModelCheckpoint: {"best": 0.4}}
    torch.save({"callbacks": callbacks, "state_dict": content}, tmp_path / "htsat.ckpt")
    before = {name: tensor.clone() for name, tensor in started.state_dict().items()}
    found = load_weights(tmp_path / "htsat.ckpt", config)
    found.load_into(started)
    for name, tensor in started.state_dict().items():
        new = name.startswith("audio.") and "fusion_model" not in name and "mel_conv2d" not in name
        assert torch.equal(tensor, (source.state_dict() if new else before)[name]), name
    with pytest.raises(ValueError, match=r"htsat\.ckpt contains only an audio tower"):
        load_weights(tmp_path / "htsat.ckpt").build()
    with pytest.raises(ValueError, match=r"doesn't fit.*different shape"):
        load_weights(tmp_path / "htsat.ckpt", load_preset("htsat_tiny_roberta_base"))
