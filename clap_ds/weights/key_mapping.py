"""Names and sizes of this model in other CLAPs: `transformers`, LAION-CLAP and open_clip.

`from_names` and `to_names` rename a state dict by a function from our key to the other names.
`config_to_transformers` converts a model's sizes, and rejects what transformers can't express.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.config.transformers_config import AUDIO, FIXED_AUDIO, FIXED_TEXT, FRONT_END, TEXT
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)

import transformers  # isort: skip

State = dict[str, Tensor]
# From a key of ours to the names of its tensors: several if it is their concatenation.
NameMapping = Callable[[str], list[str]]

# Replaced one after the other: our part of a name, and theirs.
_TRANSFORMERS_PARTS = [
    ("audio.stages.", "audio.layers."),
    ("audio.", "audio_model.audio_encoder."),
    ("text.roberta.", "text_model."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".merge.", ".downsample."),
    (".attention.relative_position_bias", ".attention.self.relative_position_bias_table"),
    (".attention.qkv.", ".attention.self.qkv."),
    (".attention.proj.", ".attention.output.dense."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
]
_LAION_PARTS = [
    ("audio.stages.", "audio.layers."),
    ("audio.batch_norm.", "audio.bn0."),
    ("audio.", "audio_branch."),
    ("text.roberta.", "text_branch."),
    (".merge.", ".downsample."),
    (".attention.relative_position_bias", ".attn.relative_position_bias_table"),
    (".attention.qkv.", ".attn.qkv."),
    (".attention.proj.", ".attn.proj."),
    ("projection.linear1.", "projection.0."),
    ("projection.linear2.", "projection.2."),
]
_LAION_TO_OPEN_CLIP = [
    ("audio_branch.", "audio.encoder."),
    ("text_branch.", "text.transformer."),
    ("_projection.", ".proj."),
    ("logit_scale_a", "logit_scale"),
]
_LOGIT_SCALES = {"logit_scale": "logit_scale_a", "logit_scale_text": "logit_scale_t"}


def _replace_parts(key: str, parts: Iterable[tuple[str, str]]) -> str:
    if key in _LOGIT_SCALES:
        return _LOGIT_SCALES[key]
    for part, replacement in parts:
        key = key.replace(part, replacement)
    return key


def transformers_names(key: str) -> list[str]:
    """Return `transformers.ClapModel`'s names for a key: three for a fused qkv, else one."""
    name = _replace_parts(key, _TRANSFORMERS_PARTS)
    if ".qkv." in name:
        return [name.replace(".qkv.", f".{part}.") for part in ("query", "key", "value")]
    return [name]


def laion_names(key: str) -> list[str]:
    """Return LAION-CLAP's name for a key."""
    return [_replace_parts(key, _LAION_PARTS)]


def open_clip_names(key: str) -> list[str]:
    """Return open_clip's name for a key, or none for the second logit scale."""
    if key == "logit_scale_text":
        return []
    (laion_name,) = laion_names(key)
    return [_replace_parts(laion_name, _LAION_TO_OPEN_CLIP)]


def from_names(keys: Iterable[str], names: NameMapping, source: Mapping[str, Tensor]) -> State:
    """Build our state from tensors with other names, omitting keys without tensors."""
    state: State = {}
    for key in keys:
        tensors = [source[name] for name in names(key) if name in source]
        if not tensors or len(tensors) < len(names(key)):
            continue
        # One tensor isn't copied.
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        # Others save logit scales and biases with 0 or 1 dimensions; ours have 1.
        state[key] = tensor.reshape(1) if key.startswith("logit_") else tensor
    return state


def to_names(state: Mapping[str, Tensor], names: NameMapping) -> State:
    """Invert `from_names`; logit scales and bias become 0-dimensional."""
    renamed: State = {}
    for key, tensor in state.items():
        new_names = names(key)
        if key.startswith("logit_"):
            tensor = tensor.reshape(())
        if len(new_names) == 1:
            renamed[new_names[0]] = tensor
        elif new_names:
            renamed |= zip(new_names, tensor.chunk(len(new_names)), strict=True)
    return renamed


def refuse(config: ClapConfig, target: str, problems: Mapping[str, bool]) -> None:
    """Raise ValueError, with the problems that apply, if there are any."""
    applying = [problem for problem, applies in problems.items() if applies]
    if applying:
        raise ValueError(f"{config.name} can't be {target}: {'; '.join(applying)}")


def config_to_transformers(config: ClapConfig) -> transformers.ClapConfig:
    """Return a model's `transformers.ClapConfig`. Raises ValueError if there is none."""
    audio = config.audio
    text = config.text
    projection = audio.projection
    is_narrow = projection.hidden_dim != config.joint_dim or not projection.bias
    problems = {
        f"its text tower is a {text.architecture} with pooling {text.pooling!r}, not a roberta with 'cls_pooler'":
            (text.architecture, text.pooling) != ("roberta", "cls_pooler"),
        f"its projections aren't equal and {config.joint_dim} wide, with biases":
            projection != text.projection or is_narrow,
        "a token grid is smaller than the window": min(audio.stage_grids) < audio.attention_window,
        "its clips aren't whole seconds": audio.num_samples % audio.sample_rate != 0,
    }  # fmt: skip
    refuse(config, "a transformers.ClapModel", problems)
    audio_config = {
        **FIXED_AUDIO,
        **{name: getattr(audio, field) for field, name in AUDIO.items()},
        "patch_size": audio.patch_size,
        "patch_stride": [audio.patch_size, audio.patch_size],
        "hidden_size": audio.output_dim,
        "num_hidden_layers": audio.num_stages,
        "mlp_ratio": float(audio.mlp_ratio),
    }
    text_config = {
        **FIXED_TEXT,
        **{name: getattr(text, field) for field, name in TEXT.items()},
        "layer_norm_eps": text.layer_norm_eps,
    }
    return transformers.ClapConfig(
        audio_config=audio_config,
        text_config=text_config,
        projection_dim=config.joint_dim,
        projection_hidden_act=projection.activation,
    )


def feature_extractor(config: AudioConfig) -> transformers.ClapFeatureExtractor:
    """Return the transformers front end.

    Without feature fusion it could only crop longer clips at random. So it rejects them with the
    error "data_truncating", `truncation`, "not implemented".
    """
    if config.fusion:
        truncation = "fusion"
    else:
        truncation = (
            "of longer clips (crop them first, or set truncation='rand_trunc' for random crops)"
        )
    return transformers.ClapFeatureExtractor(
        feature_size=config.mel_bins,
        max_length_s=config.num_samples // config.sample_rate,
        truncation=truncation,
        padding="repeatpad",
        **{name: getattr(config, field) for field, name in FRONT_END.items()},
    )
