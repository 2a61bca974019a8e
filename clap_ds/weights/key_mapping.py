"""Map state names and tensors between this model and other CLAPs."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from clap_ds.config.model import ClapConfig

State = dict[str, Tensor]

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


def _renamed(key: str, parts: Iterable[tuple[str, str]]) -> str:
    if key in _LOGIT_SCALES:
        return _LOGIT_SCALES[key]
    for ours, theirs in parts:
        key = key.replace(ours, theirs)
    return key


def transformers_names(key: str) -> list[str]:
    """Return `transformers.ClapModel`'s names for a key: three for a fused qkv, else one."""
    name = _renamed(key, _TRANSFORMERS_PARTS)
    if ".qkv." in name:
        return [name.replace(".qkv.", f".{part}.") for part in ("query", "key", "value")]
    return [name]


def laion_names(key: str) -> list[str]:
    """Return LAION-CLAP's name for a key."""
    return [_renamed(key, _LAION_PARTS)]


def open_clip_names(key: str) -> list[str]:
    """Return open_clip's name for a key, or none for the second logit scale."""
    if key == "logit_scale_text":
        return []
    return [_renamed(_renamed(key, _LAION_PARTS), _LAION_TO_OPEN_CLIP)]


def from_names(
    keys: Iterable[str], names: Callable[[str], list[str]], source: Mapping[str, Tensor]
) -> State:
    """Build our state from tensors with other names, omitting keys without tensors."""
    state: State = {}
    for key in keys:
        if (theirs := names(key)) and source.keys() >= {*theirs}:
            tensor = (
                torch.cat([source[name] for name in theirs])
                if len(theirs) > 1
                else source[theirs[0]]
            )
            state[key] = tensor.reshape(1) if key.startswith("logit_") else tensor
    return state


def to_names(state: Mapping[str, Tensor], names: Callable[[str], list[str]]) -> State:
    """Invert `from_names`; logit scales and bias become 0-dimensional."""
    renamed: State = {}
    for key, tensor in state.items():
        tensor = tensor.reshape(()) if key.startswith("logit_") else tensor
        theirs = names(key)
        renamed |= zip(
            theirs, tensor.chunk(len(theirs)) if len(theirs) > 1 else [tensor], strict=False
        )
    return renamed


def refuse(config: ClapConfig, target: str, problems: Mapping[str, bool]) -> None:
    """Raise ValueError, with the problems that apply, if there are any."""
    if found := [problem for problem, applies in problems.items() if applies]:
        raise ValueError(f"{config.name} can't be {target}: {'; '.join(found)}")
