"""Read the sizes of an installed open_clip's models from its configurations. Imports neither
open_clip nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from clap_ds.config.model_names import PRESET_DIR
from clap_ds.utils.errors import did_you_mean, first_line, how_to_install
from clap_ds.utils.files import read_object

PREFIX = "open_clip:"
FILE = "open_clip_config.json"
VERSION = "4.2.0.dev0"
# Package indexes have no such version yet.
REQUIREMENT = "open_clip_torch[audio] @ git+https://github.com/mlfoundations/open_clip"
# field of a preset → open_clip's; missing ones have HTSAT's values, as there
AUDIO = {
    "sample_rate": "sample_rate", "num_samples": "clip_samples", "stft_window": "window_size", "hop_size": "hop_size",
    "fmin": "fmin", "fmax": "fmax",
}  # fmt: skip


def convert_open_clip_config(name: str) -> dict[str, Any]:
    """Return a preset's sections for a model, named as for `open_clip.create_model`.

    They state what batches hold; other fields are HTSAT-tiny's and have no effect. Raises
    ValueError if open_clip isn't installed or has no such audio–text model.
    """
    config = _read_config(name)
    sizes = read_object(PRESET_DIR / "htsat_tiny_roberta_base.json")
    _set_audio_sizes(sizes["audio"], config["audio_cfg"])
    _set_text_sizes(sizes["text"], config["text_cfg"])
    sizes["text"]["hub_name"] = PREFIX + name
    return {"name": PREFIX + name, **sizes, "joint_dim": config["embed_dim"]}


def _set_audio_sizes(sizes: dict[str, Any], audio: dict[str, Any]) -> None:
    for field, open_clip_field in AUDIO.items():
        if open_clip_field in audio:
            sizes[field] = audio[open_clip_field]
    if audio.get("model_type") == "naflexvit":
        sizes["mel_bins"] = audio.get("mel_bins", 64)
    # HTSAT's image must hold all frames, although it isn't used.
    num_hops = sizes["num_samples"] // sizes["hop_size"]
    while sizes["image_size"] < 2**24 and num_hops >= sizes["image_size"] ** 2 // sizes["mel_bins"]:
        sizes["image_size"] *= 2


def _set_text_sizes(sizes: dict[str, Any], text: dict[str, Any]) -> None:
    is_roberta = "roberta" in text.get("hf_model_name", "")
    # RoBERTa pads with token 1, BERT and open_clip's own text towers with 0.
    sizes["architecture"] = "roberta" if is_roberta else "bert"
    if "hf_model_name" in text:
        # BERT's vocabulary, and RoBERTa's positions
        sizes["vocab_size"] = text.get("vocab_size", 28_996)
        sizes["max_positions"] = 514
    else:
        # CLIP's
        sizes["vocab_size"] = text.get("vocab_size", 49_408)
        sizes["max_positions"] = text.get("context_length", 77)


def _read_config(name: str) -> dict[str, Any]:
    """Return the configuration of a built-in model, of `hf-hub:NAME` or of `local-dir:PATH`."""
    spec = find_spec("open_clip")
    package = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (package / "clap_model.py").exists():
        installed = next((item.version for item in distributions(name="open_clip_torch")), "none")
        needed = f"open_clip_torch {VERSION} or later, found {installed}"
        raise ValueError(f"{PREFIX}{name} needs {needed}: pip install '{REQUIREMENT}'")
    schema, _, location = name.partition(":")
    if not location:
        return _read_built_in_config(package, name)
    if schema == "hf-hub":
        # not at the top: only these models need it
        from huggingface_hub import snapshot_download

        location = snapshot_download(location, allow_patterns=FILE)
    config = read_object(Path(location) / FILE).get("model_cfg", {})
    if "audio_cfg" not in config:
        raise ValueError(f"{PREFIX}{name} is no audio–text model")
    return config


def _read_built_in_config(package: Path, name: str) -> dict[str, Any]:
    audio_models = {}
    for path in (package / "model_configs").glob("*.json"):
        if "audio_cfg" in path.read_text():
            audio_models[path.stem] = path
    if name not in audio_models:
        hint = did_you_mean(name, audio_models, most_listed=0)
        raise ValueError(f"open_clip has no audio–text model {name!r}{hint}")
    return read_object(audio_models[name])


@contextmanager
def import_open_clip(name: str) -> Iterator[Any]:
    """Yield open_clip to load `name`, whose errors become ValueErrors.

    Code that models and tokenizers bring is never run. Import torchaudio_compat before.
    """
    # not at the top: it imports torch
    from transformers import dynamic_module_utils

    # transformers would ask on standard input whether to run the code, and run it after "y".
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    dynamic_module_utils.get_class_in_module = _refuse_code
    dynamic_module_utils._raise_timeout_error = _refuse_code
    try:
        yield importlib.import_module("open_clip")
    # open_clip and transformers raise various errors
    except Exception as error:
        raise ValueError(
            f"open_clip can't load {name!r}: {first_line(error)}{how_to_install(error)}"
        ) from error


def _refuse_code(*arguments: object, **options: object) -> NoReturn:
    raise ValueError("it brings code, which is never run")
