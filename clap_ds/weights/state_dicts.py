"""Read state dicts of LAION-CLAP, open_clip and HTSAT, and infer the model's sizes, which they
lack.

No code in a pickle is run. torch's restricted reader supports neither pickle protocol 4 nor numpy
scalars, which published files contain. The unpickler here creates only tensors, and ignores such
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
from clap_ds.config.model_names import list_presets
from clap_ds.utils.errors import some
from clap_ds.utils.files import hold_file
from clap_ds.weights.formats import (
    Checkpoint,
    MismatchError,
    contains_any,
    renamed_checkpoint,
)
from clap_ds.weights.key_mapping import State, laion_names, open_clip_names
from clap_ds.weights.open_clip_weights import front_end_tensors

# Parts of names of tensors that the model doesn't have: LAION's unused transforms and the front
# end, which is compared instead.
_IGNORED = ("audio_transform.", "text_transform.", ".spectrogram_extractor.", ".logmel_extractor.")
# A tensor that only state dicts with these names have.
_MARKS = {laion_names: "audio_branch.bn0.weight", open_clip_names: "audio.encoder.bn0.weight"}
_EXPECTED = (
    "expected weights of this project, LAION-CLAP, HTSAT, or open_clip's HTSAT with RoBERTa or BERT"
)
# Parts of tensors' names and shapes, and the reason to print.
_UNSUPPORTED = {
    ".caption_encoder.": "Microsoft's CLAP (msclap) isn't supported",
    ".audio_branch.conv_block1.": "LAION-CLAP's PANN audio tower isn't supported, only HTSAT",
    ".text_branch.resblocks.": "LAION-CLAP's CLIP text tower isn't supported, only RoBERTa",
    ".text_branch.shared.": "LAION-CLAP's BART text tower isn't supported, only RoBERTa",
    ".word_embeddings.weight (30522, ": "its text tower is BERT, which needs a preset with its sizes",
    ".audio_model.audio_encoder.": "transformers' ClapModel is only loaded from its folder, with config.json",
    ".audio.encoder.": "models of open_clip with other towers than HTSAT and RoBERTa need the preset open_clip:NAME",
}
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
# Of dicts in a file. Pickles may contain themselves.
_MAX_NESTING = 4
# Parts of names that DDP, torch.compile, FSDP and activation checkpointing add.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Relative to the largest mel filter: torchaudio computes them from Hz in fp32, librosa in fp64 (up
# to 31 roundings).
_MEL_TOLERANCE = 64 * torch.finfo(torch.float32).eps
_TENSOR_PARTS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
}
_NUMBER_PARTS = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "scalar"),
}
# Of objects beside HTSAT's tensors.
_IGNORED_PACKAGES = ("pytorch_lightning", "lightning")


class _IgnoredObject:
    """An object of a pickle that isn't a tensor."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that creates tensors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TENSOR_PARTS:
            create = super().find_class(module, name)
        elif (module, name) in _NUMBER_PARTS or module.partition(".")[0] in _IGNORED_PACKAGES:
            create = _IgnoredObject
        else:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, but only tensors and numbers are loaded. If you trust it,"
                " extract its tensors: torch.save(torch.load(FILE, weights_only=False)['state_dict'], 'plain.pt')"
            )
        # Wrapped, because a pickle may set attributes of what this returns.
        return lambda *arguments: create(*arguments)


class _NoTorchScript(io.BufferedReader):
    """A file that torch.jit.load can't read whole, even if it becomes a TorchScript archive while
    it is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise pickle.UnpicklingError("it is a TorchScript archive, which contains code")
        return super().read(size)


_restricted_pickle: Any = types.ModuleType(
    "restricted_pickle", "The pickle module interface that torch.load needs."
)
_restricted_pickle.Unpickler = _RestrictedUnpickler
_restricted_pickle.load = lambda file, **options: _RestrictedUnpickler(file, **options).load()


def from_state_dict(path: str | Path, content: Any, config: ClapConfig | None = None) -> Checkpoint:
    """Build a checkpoint from a file's content: a state dict of LAION-CLAP, open_clip or HTSAT, in
    any dicts and wrappers.

    Its sizes are `config`, or those of LAION's models and this project's presets that fit. Raises
    ValueError.
    """
    tensors = _unwrap_names(_find_state_dict(content) or {})
    if config is not None and config.open_clip and tensors:
        # open_clip's own names. Its logit scale and bias have no dimension.
        state = {
            name: tensor.reshape(1) if name.startswith("logit_") else tensor
            for name, tensor in tensors.items()
        }
        return Checkpoint(config, state)

    names = next((names for names, mark in _MARKS.items() if _has_suffix(tensors, mark)), None)
    if names is None:
        raise _unsupported(path, tensors, _describe_keys(content))
    tensors = _without_prefix(tensors, _MARKS[names], path)
    weights = {name: tensor for name, tensor in tensors.items() if not contains_any(name, _IGNORED)}
    has_fusion = any(".mel_conv2d." in name for name in weights)
    mismatches = []
    for sizes in [config] if config else _known_configs(has_fusion):
        try:
            checkpoint = renamed_checkpoint(sizes, weights, names, "it")
        except MismatchError as error:
            mismatches.append(error)
            continue
        # LAION-CLAP, too, starts from HTSAT's weights of another sample rate.
        if checkpoint.is_audio_tower:
            return checkpoint
        _check_front_end(tensors, sizes, path)
        # RoBERTa's, as in their training.
        return replace(checkpoint, tokenizer=sizes.text.hub_name or None)
    nearest_miss = min(mismatches, key=lambda error: error.count)
    raise _unsupported(path, tensors, str(nearest_miss))


def _find_state_dict(content: Any, nesting: int = _MAX_NESTING) -> State | None:
    """Return a file's tensors by name: those in a usual container, else in the only dict of
    tensors. None if there is none."""
    if nesting == 0 or not isinstance(content, dict):
        return None
    # A pickle may have replaced the dict's methods by attributes.
    content = dict(dict.items(content))
    for key in _CONTAINERS:
        state = _find_state_dict(content.get(key), nesting - 1)
        if state:
            return state
    tensors = {
        name: value
        for name, value in content.items()
        if isinstance(value, Tensor) and isinstance(name, str)
    }
    if tensors:
        return tensors
    inner = [_find_state_dict(value, nesting - 1) for value in content.values()]
    states = [state for state in inner if state]
    if len(states) > 1:
        # Others are an optimizer's.
        states = [state for state in states if _has_suffix(state, *_MARKS.values())]
    return states[0] if len(states) == 1 else None


def _has_suffix(state: State, *suffixes: str) -> bool:
    return any(name.endswith(suffixes) for name in state)


def _unwrap_names(state: State) -> State:
    """Return tensors under their names in the model, of HTSAT with LAION's prefix."""
    tensors: State = {}
    for name, tensor in state.items():
        unwrapped = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        tensors[unwrapped.replace("sed_model.", "audio_branch.", 1)] = tensor
    return tensors


def _without_prefix(tensors: State, mark: str, path: str | Path) -> State:
    """Return the tensors that share the prefix of the tensor `mark`, without it.

    Others are of a loss or of metrics, or the counter of torch's AveragedModel. Raises ValueError
    if there are several such tensors.
    """
    prefixes = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
    if len(prefixes) > 1:
        raise ValueError(
            f"{path}: holds {len(prefixes)} models: save the tensors with one prefix of {some(prefixes)}"
        )
    prefix = prefixes[0]
    model = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    model.pop("n_averaged", None)
    return model


def _describe_keys(content: Any) -> str:
    keys = content if isinstance(content, dict) else [type(content).__name__]
    top_level = dict.fromkeys(str(key).partition(".")[0] for key in keys)
    return f"{_EXPECTED}, found top-level keys: {some([*top_level])}"


def _unsupported(path: str | Path, tensors: State, problem: str) -> ValueError:
    """Return the error of a file that no model fits, with the model that it probably is of."""
    shapes = " ".join(f".{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    reasons = [reason for part, reason in _UNSUPPORTED.items() if part in shapes]
    return ValueError(f"{path}: {'; '.join([*reasons, problem])}")


def _check_front_end(tensors: State, config: ClapConfig, path: str | Path) -> None:
    """Raise ValueError if the STFT's window or the mel filters aren't those of `config`.

    The hop isn't saved. Tensors that are missing can't differ.
    """
    for suffix, expected in front_end_tensors(config.audio).items():
        for name, tensor in tensors.items():
            if not name.endswith(suffix):
                continue
            # The file's dtype rounds once more.
            rtol = torch.finfo(tensor.dtype).eps
            atol = float(_MEL_TOLERANCE * expected.max())
            if tensor.shape == expected.shape and torch.allclose(
                tensor.float(), expected, rtol, atol
            ):
                continue
            raise ValueError(
                f"{path} fits {config.name}, but its front end differs: {suffix}, {tuple(tensor.shape)}, isn't equal to that of"
                f" the preset, {tuple(expected.shape)}; use a preset's JSON with its stft_window, sample_rate, fmin and fmax"
            )


def _known_configs(has_fusion: bool) -> list[ClapConfig]:
    """List the presets and LAION's HTSAT-base with tiny's heads. Each has other shapes."""
    presets = {name: load_preset(name) for name in list_presets()}
    # A prefix isn't in the tensors: E5's shapes are XLM-RoBERTa's.
    presets = {name: sizes for name, sizes in presets.items() if not sizes.text.caption_prefix}
    tiny = presets["clap_htsat_tiny_roberta_base"]
    base = presets["htsat_base_roberta_base"]
    audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
    music = tiny.model_copy(update={"name": "laion_htsat_base_roberta_base", "audio": audio})
    configs = [*presets.values(), music]
    return [config for config in configs if config.audio.fusion == has_fusion]


def read_pickled(path: Path) -> Any:
    """Return the content of a `.pt` file. Raises ValueError."""
    try:
        with hold_file(path) as opened:
            return _load(opened)
    except Exception as error:  # torch raises various types for damaged files
        problem = "can't be read as a checkpoint of plain tensors"
        raise ValueError(f"{path}: {problem}: {error}") from error


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle protocol
        try:
            # This rules out TorchScript archives, which would be run.
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            with _NoTorchScript(io.FileIO(path)) as file:
                return torch.load(
                    file,
                    map_location="cpu",
                    weights_only=False,
                    pickle_module=_restricted_pickle,
                )
