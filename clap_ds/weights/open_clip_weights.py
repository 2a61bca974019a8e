"""Write models as folders of open_clip's CLAP, with the sizes and tensors that
`open_clip.create_model` expects."""

import json
from pathlib import Path
from typing import Any

import torch

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.config.open_clip_config import AUDIO
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.mel import LogMel
from clap_ds.weights.formats import write_tensors
from clap_ds.weights.key_mapping import State, open_clip_names, refuse, to_names

WEIGHTS = "open_clip_model.safetensors"
_VARIANTS = {
    "tiny": (96, [2, 2, 6, 2]),
    "base": (128, [2, 2, 12, 2]),
    "large": (256, [2, 2, 12, 2]),
}
_FIXED = {
    "num_heads": [4, 8, 16, 32],
    "image_size": 256,
    "patch_size": 4,
    "attention_window": 8,
    "mlp_ratio": 4,
}
_RENAMED = {theirs: ours for ours, theirs in AUDIO.items()}
_RENAMED |= {"class_num": "num_classes", "enable_fusion": "fusion", "mel_bins": "mel_bins"}
"""Our fields by open_clip's."""


def save_open_clip(model: ContrastiveModel, folder: Path, context_length: int) -> None:
    """Write fp32 weights and sizes for `open_clip.create_model("local-dir:FOLDER")`, or for its
    `pretrained=` a file. Raises ValueError if open_clip can't express the model."""
    bias = {} if model.logit_bias is None else {"init_logit_bias": -10.0}
    sizes = model_cfg(model.config, context_length) | bias
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": sizes, "preprocess_cfg": {}}, indent=1)
    )
    write_tensors(folder / WEIGHTS, to_open_clip(model), {"format": "pt"})


def model_cfg(config: ClapConfig, context_length: int) -> dict[str, Any]:
    """Return open_clip's configuration of a model. Raises ValueError if it has none."""
    audio = config.audio
    text = config.text
    width = config.joint_dim
    fits = all(getattr(audio, name) == value for name, value in _FIXED.items())
    variant = next(
        (
            name
            for name, each in _VARIANTS.items()
            if fits and each == (audio.embed_dim, audio.depths)
        ),
        None,
    )
    heads = {
        ("gelu", False, (text.hidden_size + width) // 2): "mlp",
        ("relu", True, width): "clap_mlp",
    }
    head = heads.get((text.projection.activation, text.projection.bias, text.projection.hidden_dim))
    problems = {
        "its audio tower is not HTSAT-tiny, -base or -large": variant is None,
        f"its audio projection isn't {width} wide with biases": audio.projection.hidden_dim != width
        or not audio.projection.bias,
        f"its text projection (activation, bias, width) is none of {[*heads]}": head is None,
        "its text tower has no hub_name": not text.hub_name,
    }
    refuse(config, "a model of open_clip", problems)
    sizes = {theirs: getattr(audio, ours) for theirs, ours in _RENAMED.items()}
    kind = {"model_type": "HTSAT", "model_name": variant, "proj_act": audio.projection.activation}
    tower: dict[str, Any] = {
        "hf_model_name": text.hub_name,
        "hf_tokenizer_name": text.hub_name,
        "hf_proj_type": head,
    }
    tower |= {"hf_pooler_type": "mean_pooler" if text.pooling == "mean" else "cls_pooler"}
    tower |= {
        "hf_model_config": {"layer_norm_eps": text.layer_norm_eps},
        "context_length": context_length,
    }
    return {"embed_dim": width, "audio_cfg": kind | sizes, "text_cfg": tower}


def to_open_clip(model: ContrastiveModel) -> State:
    """Return a model's fp32 state in open_clip's names, with the constants that it saves as
    tensors."""
    renamed = to_names(model.state_dict(), open_clip_names)
    state = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in renamed.items()
    }
    stages: Any = model.get_submodule("audio.stages")
    for number, stage in enumerate(stages):
        for place, block in enumerate(stage.blocks):
            name = f"audio.encoder.layers.{number}.blocks.{place}"
            state[f"{name}.attn.relative_position_index"] = block.attention.relative_position_index
            if block.shift:
                state[f"{name}.attn_mask"] = stage.mask.clone()
    state |= {
        f"audio.encoder.{name}": tensor
        for name, tensor in front_end_tensors(model.config.audio).items()
    }
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def front_end_tensors(audio: AudioConfig) -> State:
    """Return the STFT's kernels and mel filters (frequencies, mel bins) that torchlibrosa, the
    front end of HTSAT, saves."""
    front_end = LogMel(audio.model_copy(update={"fusion": False}))  # with fusion unused
    waves_KN = torch.fft.rfft(torch.diag(front_end.window.double()), dim=0)[:, None]
    return {
        "spectrogram_extractor.stft.conv_real.weight": waves_KN.real.float(),
        "spectrogram_extractor.stft.conv_imag.weight": waves_KN.imag.float(),
        "logmel_extractor.melW": front_end.mel_filters.T,
    }
