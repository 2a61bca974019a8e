"""Write models as folders that `open_clip.create_model` loads."""

import json
from pathlib import Path
from typing import Any

import torch

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.config.open_clip_config import AUDIO
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.mel import LogMel
from clap_ds.weights.formats import to_fp32, write_tensors
from clap_ds.weights.key_mapping import State, open_clip_names, refuse, to_names

WEIGHTS = "open_clip_model.safetensors"
# Embedding width and layers per stage, by open_clip's `model_name`. Other sizes are fixed there.
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
_AUDIO_FIELDS = {name: field for field, name in AUDIO.items()}
# open_clip's fields → ours.
_AUDIO_FIELDS |= {"class_num": "num_classes", "enable_fusion": "fusion", "mel_bins": "mel_bins"}


def save_open_clip(model: ContrastiveModel, folder: Path, context_length: int) -> None:
    """Write fp32 weights and sizes for `open_clip.create_model("local-dir:FOLDER")`, or for its
    `pretrained=` a file.

    Raises ValueError if open_clip can't express the model.
    """
    sizes = model_cfg(model.config, context_length)
    if model.logit_bias is not None:
        sizes["init_logit_bias"] = -10.0
    content = json.dumps({"model_cfg": sizes, "preprocess_cfg": {}}, indent=1)
    (folder / "open_clip_config.json").write_text(content)
    write_tensors(folder / WEIGHTS, to_open_clip(model), {"format": "pt"})


def model_cfg(config: ClapConfig, context_length: int) -> dict[str, Any]:
    """Return open_clip's configuration of a model. Raises ValueError if it has none."""
    audio = config.audio
    text = config.text
    width = config.joint_dim
    variant = None
    if all(getattr(audio, name) == value for name, value in _FIXED.items()):
        for name, sizes in _VARIANTS.items():
            if sizes == (audio.embed_dim, audio.depths):
                variant = name
    # Activation, bias and width, by open_clip's `hf_proj_type`.
    projections = {
        ("gelu", False, (text.hidden_size + width) // 2): "mlp",
        ("relu", True, width): "clap_mlp",
    }
    projection = text.projection
    projection_type = projections.get(
        (projection.activation, projection.bias, projection.hidden_dim)
    )
    is_audio_narrow = audio.projection.hidden_dim != width
    problems = {
        "its audio tower is not HTSAT-tiny, -base or -large": variant is None,
        f"its audio projection isn't {width} wide with biases":
            is_audio_narrow or not audio.projection.bias,
        f"its text projection (activation, bias, width) is none of {[*projections]}":
            projection_type is None,
        "its text tower has no hub_name": not text.hub_name,
    }  # fmt: skip
    refuse(config, "a model of open_clip", problems)
    audio_cfg = {
        "model_type": "HTSAT",
        "model_name": variant,
        "proj_act": audio.projection.activation,
        **{name: getattr(audio, field) for name, field in _AUDIO_FIELDS.items()},
    }
    text_cfg = {
        "hf_model_name": text.hub_name,
        "hf_tokenizer_name": text.hub_name,
        "hf_proj_type": projection_type,
        "hf_pooler_type": "mean_pooler" if text.pooling == "mean" else "cls_pooler",
        "hf_model_config": {
            "layer_norm_eps": text.layer_norm_eps,
            # open_clip masks these tokens. The Hub's configuration may state another tokenizer's.
            "pad_token_id": text.pad_token_id,
        },
        "context_length": context_length,
    }
    return {"embed_dim": width, "audio_cfg": audio_cfg, "text_cfg": text_cfg}


def to_open_clip(model: ContrastiveModel) -> State:
    """Return a model's fp32 state in open_clip's names, with the constants that it saves as
    tensors."""
    state = to_fp32(to_names(model.state_dict(), open_clip_names))
    stages: Any = model.get_submodule("audio.stages")
    for stage_number, stage in enumerate(stages):
        for block_number, block in enumerate(stage.blocks):
            name = f"audio.encoder.layers.{stage_number}.blocks.{block_number}"
            state[f"{name}.attn.relative_position_index"] = block.attention.relative_position_index
            # Only shifted windows have a mask, which blocks of a stage share here.
            if block.shift:
                state[f"{name}.attn_mask"] = stage.mask.clone()
    for name, tensor in front_end_tensors(model.config.audio).items():
        state[f"audio.encoder.{name}"] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def front_end_tensors(audio: AudioConfig) -> State:
    """Return the STFT's kernels and mel filters (frequencies, mel bins) that torchlibrosa, the
    front end of HTSAT, saves."""
    # Feature fusion changes neither of them.
    front_end = LogMel(audio.model_copy(update={"fusion": False}))
    # The Fourier transform of the windowed unit impulses: (frequencies, 1, window).
    waves_KN = torch.fft.rfft(torch.diag(front_end.window.double()), dim=0)[:, None]
    return {
        "spectrogram_extractor.stft.conv_real.weight": waves_KN.real.float(),
        "spectrogram_extractor.stft.conv_imag.weight": waves_KN.imag.float(),
        "logmel_extractor.melW": front_end.mel_filters.T,
    }
