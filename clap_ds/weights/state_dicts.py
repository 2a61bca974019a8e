"""Read state dicts of LAION-CLAP, open_clip and HTSAT, and infer the model's sizes, which they lack.

No code in a pickle is run. torch's restricted reader supports neither pickle protocol 4 nor numpy scalars, which
published files contain. The unpickler here creates only tensors, and skips such numbers.
"""

import pickle
import types
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clap_ds.config.errors import some
from clap_ds.config.files import pinned
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.weights.formats import Checkpoint, renamed_checkpoint
from clap_ds.weights.key_mapping import laion_names, open_clip_names

_IGNORED = ("audio_transform.", "text_transform.", ".spectrogram_extractor.", ".logmel_extractor.")
_MARKS = {
    laion_names: {"audio_branch.bn0.weight"},
    open_clip_names: {"audio.encoder.bn0.weight", "text.transformer.embeddings.word_embeddings.weight"},
}
"""Tensors that tell whose names a state dict has. open_clip's other towers lack them."""
_EXPECTED = "expected weights of this project, LAION-CLAP, HTSAT, or open_clip's HTSAT with RoBERTa or BERT"
_REBUILT = ("_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2")
_OF_TENSORS = {("collections", "OrderedDict"), ("torch", "Size"), *(("torch._utils", name) for name in _REBUILT)}
_ARRAYS = ("numpy._core.multiarray", "numpy.core.multiarray")
_SKIPPED = ("pytorch_lightning", "lightning")  # packages of objects beside HTSAT's tensors
_OF_NUMBERS = {("_codecs", "encode"), ("numpy", "dtype"), *((module, "scalar") for module in _ARRAYS)}


class _PassedOver:
    def __init__(self, *made_from: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _TensorsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_TENSORS | _OF_NUMBERS or module.partition(".")[0] in _SKIPPED:
            made_by = super().find_class(module, name) if (module, name) in _OF_TENSORS else _PassedOver
            return lambda *arguments: made_by(*arguments)  # wrapped, because a pickle may set attributes
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, but only tensors and numbers are loaded. If you trust it,"
            " extract its tensors: torch.save(torch.load(FILE, weights_only=False)['state_dict'], 'plain.pt')"
        )


_tensors_only: Any = types.ModuleType("tensors_only", "The pickle module interface that torch.load needs.")
_tensors_only.Unpickler = _TensorsOnly
_tensors_only.load = lambda file, **options: _TensorsOnly(file, **options).load()


def from_state_dict(path: str | Path, state: Mapping[str, Any], config: ClapConfig | None = None) -> Checkpoint:
    """Build a checkpoint from a state dict of LAION-CLAP, open_clip or HTSAT, with or without a `module.` prefix.

    Its sizes are `config`, or those of LAION's models and this project's presets that fit. Raises ValueError.
    """
    if config is not None and config.open_clip:
        named = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        return Checkpoint(config, {name: t.reshape(1) if name.startswith("logit_") else t for name, t in named.items()})
    tensors = {
        name.removeprefix("module.").replace("sed_model.", "audio_branch.", 1): value
        for name, value in state.items()
        if isinstance(value, Tensor) and not any(part in name for part in _IGNORED)
    }
    names = next((names for names, marks in _MARKS.items() if marks <= tensors.keys()), None)
    if names is None:
        raise ValueError(f"{path}: {_EXPECTED}, found {some([*tensors])}")
    problems = []
    for layout in [config] if config else _layouts(any(".mel_conv2d." in name for name in tensors)):
        try:
            found = renamed_checkpoint(layout, tensors, names, str(path))
            tokenizer = None if found.is_audio_tower else layout.text.hub_name or None
            return replace(found, tokenizer=tokenizer)  # RoBERTa's, as in their training
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0])


def _layouts(has_fusion: bool) -> list[ClapConfig]:
    """List the presets and LAION's HTSAT-base with tiny's heads. Each has other shapes."""
    presets = [load_preset(name) for name in preset_names()]
    tiny, base = load_preset("clap_htsat_tiny_roberta_base"), load_preset("htsat_base_roberta_base")
    audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
    music = tiny.model_copy(update={"name": "laion_htsat_base_roberta_base", "audio": audio})
    return [each for each in [*presets, music] if each.audio.fusion == has_fusion]


def read_pickled(path: Path) -> dict[str, Any]:
    """Return the state dict of a `.pt` file, bare or under "state_dict". Raises ValueError."""
    try:
        with pinned(path) as opened:
            content = _load(opened)
    except Exception as error:  # torch raises various types for damaged files
        raise ValueError(f"{path}: can't be read as a checkpoint of plain tensors: {error}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path}: no state dict (tensors by name) found, bare or under 'state_dict'")
    return state


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle protocol
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # this rules out TorchScript archives, which would be run
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_tensors_only)
