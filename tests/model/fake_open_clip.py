"""A stand-in for open_clip, with the part of its interface that `OpenClipModel` uses, and small
towers."""

import json
from pathlib import Path

import pytest

PACKAGE = """
from types import SimpleNamespace
import torch
from torch import nn

class Audio(nn.Module):
    def __init__(self, cfg, width):
        super().__init__()
        self.cfg = SimpleNamespace(enable_fusion=False, training_head=False, **cfg)
        self.norm, self.proj = nn.BatchNorm1d(16), nn.Linear(16, width)
        self.unused = nn.Linear(2, 2)
        self.filters = nn.Parameter(torch.ones(3, 2).T, requires_grad=False)
        self.is_checkpointed = False
    def set_grad_checkpointing(self):
        self.is_checkpointed = True
    def forward(self, audio):
        if "patches" in audio:
            assert audio["patch_valid"].all()
            return self.proj(audio["patches"].mean(dim=1) / 100)
        assert not audio["longer"].any()
        return self.proj(self.norm(audio["waveform"].unflatten(1, (16, -1)).square().mean(dim=2)))

class Text(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(100, width)
    def forward(self, ids):
        return self.words(ids).mean(dim=1)

def create_model(name, pretrained_text, nonscalar_logit_scale, output_dict, init_logit_scale=2.6, init_logit_bias=None):
    from .clap_model import CONFIG
    model = nn.Module()
    model.audio, model.text = Audio(CONFIG[name], 8), Text(8)
    model.logit_scale = nn.Parameter(torch.tensor([init_logit_scale]))
    model.logit_bias = None if init_logit_bias is None else nn.Parameter(torch.tensor([init_logit_bias]))
    return model

class Tokenizer:
    pad_token_id = 0
    def __call__(self, captions, context_length):
        rows = [[98, *(len(word) for word in each.split()), 99][:context_length] for each in captions]
        return torch.tensor([row + [0] * (context_length - len(row)) for row in rows])

get_tokenizer = lambda name: Tokenizer()
"""
PATCHES = """
import torch
def mel_to_patches(mel, patch_freq, patch_time, in_chans, pad_mode):
    valid = torch.ones(len(mel), dtype=torch.bool)
    return {"patches": mel.clone(), "patch_coord": torch.zeros(len(mel), 2), "patch_valid": valid}
"""
AUDIO = {"sample_rate": 16000, "clip_samples": 16000, "hop_size": 160}
CONFIGS = {
    "fake-htsat": AUDIO | {"model_type": "HTSAT"},
    "fake-naflex": AUDIO
    | {
        "model_type": "naflexvit",
        "mel_bins": 16,
        "patch_freq": 16,
        "patch_time": 4,
        "in_chans": 1,
        "patch_pad_mode": "",
    },
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the package and make it importable, also in subprocesses."""
    files = {
        "__init__.py": PACKAGE,
        "clap_model.py": f"CONFIG = {CONFIGS!r}",
        "audio/__init__.py": "",
    }
    text = {"context_length": 16, "vocab_size": 100}
    for name, audio in CONFIGS.items():
        files[f"model_configs/{name}.json"] = json.dumps(
            {"embed_dim": 8, "audio_cfg": audio, "text_cfg": text}
        )
    files["model_configs/ViT.json"] = json.dumps(
        {"embed_dim": 8, "vision_cfg": {}, "text_cfg": text}
    )
    for name, content in (files | {"audio/naflex_audio.py": PATCHES}).items():
        (folder / "open_clip" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "open_clip" / name).write_text(content)
    monkeypatch.syspath_prepend(str(folder))
