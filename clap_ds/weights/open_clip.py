"""Write models as folders of open_clip's CLAP, with the sizes and tensors that `open_clip.create_model` expects."""

import json
from pathlib import Path
from typing import Any

import torch

from clap_ds.config.model import ClapConfig
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import LogMel
from clap_ds.model.swin import Stage, SwinBlock
from clap_ds.weights.key_mapping import State, open_clip_names, to_names
from clap_ds.weights.state_file import write_tensors

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
_VARIANTS = {"tiny": (96, [2, 2, 6, 2]), "base": (128, [2, 2, 12, 2]), "large": (256, [2, 2, 12, 2])}
_FIXED = {"num_heads": [4, 8, 16, 32], "image_size": 256, "patch_size": 4, "attention_window": 8, "mlp_ratio": 4}
# open_clip's field → our field
_AUDIO = {
    "sample_rate": "sample_rate",
    "clip_samples": "num_samples",
    "window_size": "stft_window",
    "hop_size": "hop_size",
    "mel_bins": "mel_bins",
    "fmin": "fmin",
    "fmax": "fmax",
    "class_num": "num_classes",
    "enable_fusion": "fusion",
}
_POOLERS = {"mean": "mean_pooler", "cls_pooler": "cls_pooler"}


def save_open_clip(model: ClapModel, folder: Path, context_length: int) -> None:
    """Write fp32 weights and sizes for `open_clip.create_model("local-dir:FOLDER")`, or for its `pretrained=` a file. Raises
    ValueError if open_clip can't express the model."""
    sizes = model_cfg(model.config, context_length)
    if model.logit_bias is not None:
        sizes["init_logit_bias"] = -10.0
    (folder / CONFIG).write_text(json.dumps({"model_cfg": sizes, "preprocess_cfg": {}}, indent=1))
    write_tensors(folder / WEIGHTS, to_open_clip(model), {"format": "pt"})


def model_cfg(config: ClapConfig, context_length: int) -> dict[str, Any]:
    """Return open_clip's configuration of a model. Raises ValueError if it has none."""
    audio, text, width = config.audio, config.text, config.joint_dim
    variants = [name for name, each in _VARIANTS.items() if each == (audio.embed_dim, audio.depths)]
    projections = {
        ("gelu", False, (text.hidden_size + width) // 2): "mlp",
        ("relu", True, width): "clap_mlp",
    }
    projection = projections.get((text.projection.activation, text.projection.bias, text.projection.hidden_dim))
    problems = {
        "its audio tower is not HTSAT-tiny, -base or -large": not variants
        or any(getattr(audio, name) != value for name, value in _FIXED.items()),
        f"its audio projection has no biases, or not {width} channels": not audio.projection.bias
        or audio.projection.hidden_dim != width,
        f"its text projection is none of {[*projections]} (activation, biases, channels)": projection is None,
        "its text tower has no hub_name": not text.hub_name,
    }
    if found := [problem for problem, applies in problems.items() if applies]:
        raise ValueError(f"{config.name} can't be a model of open_clip: {'; '.join(found)}")
    sizes = {theirs: getattr(audio, ours) for theirs, ours in _AUDIO.items()}
    return {
        "embed_dim": width,
        "audio_cfg": {
            "model_type": "HTSAT",
            "model_name": variants[0],
            **sizes,
            "proj_act": audio.projection.activation,
        },
        "text_cfg": {
            "hf_model_name": text.hub_name,
            "hf_tokenizer_name": text.hub_name,
            "hf_pooler_type": _POOLERS[text.pooling],
            "hf_proj_type": projection,
            "hf_model_config": {"layer_norm_eps": text.layer_norm_eps},
            "context_length": context_length,
        },
    }


def to_open_clip(model: ClapModel) -> State:
    """Return a model's fp32 state in open_clip's names, with the constants that it saves as tensors."""
    renamed = to_names(model.state_dict(), open_clip_names)
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in renamed.items()}
    for number, stage in enumerate(model.audio.stages):
        assert isinstance(stage, Stage)
        for place, block in enumerate(stage.blocks):
            assert isinstance(block, SwinBlock)
            name = f"audio.encoder.layers.{number}.blocks.{place}"
            state[f"{name}.attn.relative_position_index"] = block.attention.relative_position_index
            if block.shift and stage.mask is not None:
                state[f"{name}.attn_mask"] = stage.mask.clone()
    mel = LogMel(model.config.audio.model_copy(update={"fusion": False}))  # with fusion it is unused
    waves_KN = torch.fft.rfft(torch.diag(mel.window.double()), dim=0)[:, None]
    state["audio.encoder.spectrogram_extractor.stft.conv_real.weight"] = waves_KN.real.float()
    state["audio.encoder.spectrogram_extractor.stft.conv_imag.weight"] = waves_KN.imag.float()
    state["audio.encoder.logmel_extractor.melW"] = mel.mel_filters.T
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}
