"""Read state dicts of LAION-CLAP, open_clip and HTSAT, and infer the model's sizes, which they
lack.

No code in a pickle is run. torch's restricted reader supports neither pickle protocol 4 nor numpy
scalars, which published files contain. The unpickler here creates only tensors, and skips such
numbers.
"""

import io
import pickle
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.utils.errors import some
from clap_ds.utils.files import pinned
from clap_ds.weights.formats import Checkpoint, MismatchError, renamed_checkpoint
from clap_ds.weights.key_mapping import State, laion_names, open_clip_names
from clap_ds.weights.open_clip_weights import front_end_tensors

_IGNORED = ("audio_transform.", "text_transform.", ".spectrogram_extractor.", ".logmel_extractor.")
_MARKS = {laion_names: "audio_branch.bn0.weight", open_clip_names: "audio.encoder.bn0.weight"}
"""Tensors that tell whose names a state dict has."""
_EXPECTED = (
    "expected weights of this project, LAION-CLAP, HTSAT, or open_clip's HTSAT with RoBERTa or BERT"
)
_UNSUPPORTED = {
    ".caption_encoder.": "Microsoft's CLAP (msclap) isn't supported",
    ".audio_branch.conv_block1.": "LAION-CLAP's PANN audio tower isn't supported, only HTSAT",
    ".text_branch.resblocks.": "LAION-CLAP's CLIP text tower isn't supported, only RoBERTa",
    ".text_branch.shared.": "LAION-CLAP's BART text tower isn't supported, only RoBERTa",
    ".word_embeddings.weight (30522, ": "its text tower is BERT, which needs a preset with its sizes",
    ".audio_model.audio_encoder.": "transformers' ClapModel is only loaded from its folder, with config.json",
    ".audio.encoder.": "models of open_clip with other towers than HTSAT and RoBERTa need the preset open_clip:NAME",
}
"""Parts of tensors' names and shapes."""
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that DDP, torch.compile, FSDP and activation checkpointing add."""
_ROUNDINGS = 64 * torch.finfo(torch.float32).eps
"""Relative to the largest mel filter: torchaudio computes them from Hz in fp32, librosa in fp64 (up
to 31 roundings)."""
_REBUILT = ("_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2")
_OF_TENSORS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    *(("torch._utils", name) for name in _REBUILT),
}
_ARRAYS = ("numpy._core.multiarray", "numpy.core.multiarray")
_SKIPPED = ("pytorch_lightning", "lightning")  # packages of objects beside HTSAT's tensors
_OF_NUMBERS = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    *((module, "scalar") for module in _ARRAYS),
}


class _PassedOver:
    def __init__(self, *made_from: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _TensorsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_TENSORS | _OF_NUMBERS or module.partition(".")[0] in _SKIPPED:
            made_by = (
                super().find_class(module, name) if (module, name) in _OF_TENSORS else _PassedOver
            )
            return lambda *arguments: made_by(
                *arguments
            )  # wrapped, because a pickle may set attributes
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, but only tensors and numbers are loaded. If you trust it,"
            " extract its tensors: torch.save(torch.load(FILE, weights_only=False)['state_dict'], 'plain.pt')"
        )


class _NoTorchScript(io.BufferedReader):
    """A file that torch.jit.load can't read whole, even if it becomes a TorchScript archive while
    it is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise pickle.UnpicklingError("it is a TorchScript archive, which contains code")
        return super().read(size)


_tensors_only: Any = types.ModuleType(
    "tensors_only", "The pickle module interface that torch.load needs."
)
_tensors_only.Unpickler = _TensorsOnly
_tensors_only.load = lambda file, **options: _TensorsOnly(file, **options).load()


def from_state_dict(path: str | Path, content: Any, config: ClapConfig | None = None) -> Checkpoint:
    """Build a checkpoint from a file's content: a state dict of LAION-CLAP, open_clip or HTSAT, in
    any dicts and wrappers.

    Its sizes are `config`, or those of LAION's models and this project's presets that fit. Raises
    ValueError.
    """
    keys = content if isinstance(content, dict) else [type(content).__name__]
    problem = f"{_EXPECTED}, found top-level keys: {some([*dict.fromkeys(str(key).partition('.')[0] for key in keys)])}"
    tensors: State = {}
    for name, tensor in (_find_state_dict(content) or {}).items():
        unwrapped = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        tensors[unwrapped.replace("sed_model.", "audio_branch.", 1)] = tensor
    if config is not None and config.open_clip and tensors:
        return Checkpoint(
            config,
            {name: t.reshape(1) if name.startswith("logit_") else t for name, t in tensors.items()},
        )
    mismatches = []
    for names, mark in _MARKS.items():
        prefixes = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
        if not prefixes:
            continue
        if len(prefixes) > 1:
            raise ValueError(
                f"{path}: holds {len(prefixes)} models: save the tensors with one prefix of {some(prefixes)}"
            )
        prefix = prefixes[0]
        # Other names are of a loss, of metrics, or the counter of torch's AveragedModel.
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        tensors.pop("n_averaged", None)
        weights = {
            name: tensor
            for name, tensor in tensors.items()
            if not any(part in name for part in _IGNORED)
        }
        for layout in (
            [config] if config else _layouts(any(".mel_conv2d." in name for name in weights))
        ):
            try:
                checkpoint = renamed_checkpoint(layout, weights, names, "it")
            except MismatchError as error:
                mismatches.append(error)
                continue
            if (
                checkpoint.is_audio_tower
            ):  # LAION-CLAP, too, starts from HTSAT's weights of another sample rate
                return checkpoint
            _check_front_end(tensors, layout, path)
            return replace(
                checkpoint, tokenizer=layout.text.hub_name or None
            )  # RoBERTa's, as in their training
    if mismatches:
        problem = str(min(mismatches, key=lambda error: error.count))
    shapes = " ".join(f".{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    reasons = [reason for part, reason in _UNSUPPORTED.items() if part in shapes]
    raise ValueError(f"{path}: {'; '.join([*reasons, problem])}")


def _find_state_dict(content: Any, nesting: int = 4) -> dict[str, Tensor] | None:
    """Return a file's tensors by name: those in a usual container, else in the only dict of
    tensors. None if there is none."""
    if nesting == 0 or not isinstance(content, dict):
        return None
    content = dict(dict.items(content))  # a pickle may have given it other attributes
    for key in _CONTAINERS:
        if state := _find_state_dict(content.get(key), nesting - 1):
            return state
    if tensors := {
        key: value
        for key, value in content.items()
        if isinstance(value, Tensor) and isinstance(key, str)
    }:
        return tensors
    states = [
        state for value in content.values() if (state := _find_state_dict(value, nesting - 1))
    ]
    models = [
        state for state in states if any(name.endswith((*_MARKS.values(),)) for name in state)
    ]
    if len(states) > 1:  # others are an optimizer's
        states = models
    return states[0] if len(states) == 1 else None


def _check_front_end(tensors: State, config: ClapConfig, path: str | Path) -> None:
    """Raise ValueError if the STFT's window or the mel filters aren't those of `config`. The hop
    isn't saved."""
    for suffix, expected in front_end_tensors(config.audio).items():
        tensor = next(
            (tensor for name, tensor in tensors.items() if name.endswith(suffix)), expected
        )
        rtol = torch.finfo(tensor.dtype).eps  # the file's dtype rounds once more
        atol = float(_ROUNDINGS * expected.max())
        if tensor.shape != expected.shape or not torch.allclose(
            tensor.float(), expected, rtol, atol
        ):
            raise ValueError(
                f"{path} fits {config.name}, but its front end differs: {suffix}, {tuple(tensor.shape)}, isn't equal to that of"
                f" the preset, {tuple(expected.shape)}; use a preset's JSON with its stft_window, sample_rate, fmin and fmax"
            )


def _layouts(has_fusion: bool) -> list[ClapConfig]:
    """List the presets and LAION's HTSAT-base with tiny's heads. Each has other shapes."""
    presets = {name: load_preset(name) for name in preset_names()}
    tiny = presets["clap_htsat_tiny_roberta_base"]
    base = presets["htsat_base_roberta_base"]
    audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
    music = tiny.model_copy(update={"name": "laion_htsat_base_roberta_base", "audio": audio})
    return [layout for layout in [*presets.values(), music] if layout.audio.fusion == has_fusion]


def read_pickled(path: Path) -> Any:
    """Return the content of a `.pt` file. Raises ValueError."""
    try:
        with pinned(path) as opened:
            return _load(opened)
    except Exception as error:  # torch raises various types for damaged files
        raise ValueError(
            f"{path}: can't be read as a checkpoint of plain tensors: {error}"
        ) from error


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle protocol
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # this rules out TorchScript archives, which would be run
            with _NoTorchScript(io.FileIO(path)) as file:
                return torch.load(
                    file, map_location="cpu", weights_only=False, pickle_module=_tensors_only
                )
