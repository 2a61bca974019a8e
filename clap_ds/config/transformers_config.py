"""Convert the files of a `transformers.ClapModel` and its `ClapFeatureExtractor` to the format of
`presets/*.json`, without transformers.

Unsupported models and front ends are rejected with the reason.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from clap_ds.config.model_names import PRESET_DIR
from clap_ds.utils.files import read_object

# Fixed properties of HTSAT and RoBERTa here, and transformers' defaults.
FIXED_AUDIO = {"hidden_act": "gelu", "qkv_bias": True, "layer_norm_eps": 1e-5}
FIXED_TEXT = {"hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1}
# Our field → transformers' field, one dict per object.
AUDIO = {
    "attention_window": "window_size", "mel_bins": "num_mel_bins", "image_size": "spec_size", "depths": "depths",
    "embed_dim": "patch_embeds_hidden_size", "num_heads": "num_attention_heads", "num_classes": "num_classes",
    "fusion": "enable_fusion",
}  # fmt: skip
TEXT = {
    "vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
}  # fmt: skip
FRONT_END = {
    "sample_rate": "sampling_rate", "stft_window": "fft_window_size", "hop_size": "hop_length", "fmin": "frequency_min",
    "fmax": "frequency_max",
}  # fmt: skip
FIXED_FRONT_END = {
    "feature_extractor_type": "ClapFeatureExtractor", "padding": "repeatpad", "padding_side": "right",
    "padding_value": 0, "return_attention_mask": False, "top_db": None,
}  # fmt: skip


def sizes_of_clap(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert `config.json` to a preset's sections, unchecked, with LAION-CLAP's front end. Missing
    fields take transformers' defaults, `clap_htsat_tiny_roberta_base`. Raises ValueError naming an
    unsupported field."""
    if fields.get("model_type") != "clap":
        raise ValueError(
            f"config.json has model_type {fields.get('model_type')!r}, expected 'clap'"
        )
    audio, text = (fields.get(f"{tower}_config") or {} for tower in ("audio", "text"))
    patch = audio.get("patch_size", 4)
    ratio = audio.get("mlp_ratio", 4.0)
    activation = fields.get("projection_hidden_act", "relu")
    joint_dim = fields.get("projection_dim", 512)
    expected = FIXED_AUDIO | {
        "fusion_type": "aff_2d" if audio.get("fusion_type") else None,
        "patch_stride": patch if audio.get("patch_stride") == patch else [patch, patch],
        "mlp_ratio": round(ratio),
    }
    _require(audio, expected, "audio_config.")
    _require(text, FIXED_TEXT, "text_config.")
    tiny = read_object(PRESET_DIR / "clap_htsat_tiny_roberta_base.json")
    projection = {"hidden_dim": joint_dim, "activation": activation, "bias": True}
    tiny["audio"]["fusion"] = False
    own_audio = tiny["audio"] | {
        ours: audio[theirs] for ours, theirs in AUDIO.items() if theirs in audio
    }
    own_audio |= {"patch_size": patch, "mlp_ratio": round(ratio), "projection": projection}
    own_text = tiny["text"] | {
        ours: text[theirs] for ours, theirs in TEXT.items() if theirs in text
    }
    own_text |= {
        "hub_name": tiny["text"]["hub_name"] if own_text == tiny["text"] else "",
        "pooling": "cls_pooler",
    }
    own_text |= {"layer_norm_eps": text.get("layer_norm_eps", 1e-12), "projection": projection}
    return {"audio": own_audio, "text": own_text, "joint_dim": joint_dim}


def convert_front_end(saved: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """Convert a saved `ClapFeatureExtractor` to fields of a preset's `audio` section. Raises
    ValueError for a value that the front end here can't have."""
    extractor = {
        "frequency_min": 0,
        "max_length_s": 10,
    } | saved  # the defaults of its class, or LAION-CLAP's values
    sizes = {ours: extractor.get(theirs, audio[ours]) for ours, theirs in FRONT_END.items()}
    sizes["fmax"] = int(sizes["fmax"])  # saved as 14000 or 14000.0
    sizes["num_samples"] = extractor["max_length_s"] * sizes["sample_rate"]
    expected = FIXED_FRONT_END | {
        "frequency_max": sizes["fmax"],
        "feature_size": audio["mel_bins"],
        "nb_max_samples": sizes["num_samples"],
        "nb_frequency_bins": sizes["stft_window"] // 2 + 1,
    }
    # "fusion" has other mel filters than the others, which only differ in how they treat clips that
    # are too long.
    if audio["fusion"]:
        expected["truncation"] = "fusion"
    elif extractor.get("truncation") == "fusion":
        expected["truncation"] = "rand_trunc"
    _require(extractor, expected)
    return sizes


def _require(fields: dict[str, Any], expected: dict[str, Any], section: str = "") -> None:
    """Raise ValueError for a field that has another value than expected."""
    for field, value in expected.items():
        if fields.get(field, value) != value:
            raise ValueError(
                f"{section}{field} is {fields[field]!r}; only {value!r} is supported with this model"
            )


def read_clap(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Call `sizes_of_clap` with a `config.json` and the front end saved next to it. Prints which
    front end is assumed if there is none. Raises ValueError, with the file, if they are unreadable
    or unsupported."""
    # transformers 5 nests the front end in the first file, which it prefers. Earlier versions wrote
    # the second.
    source = path.with_name("processor_config.json")
    saved = read_object(source).get("feature_extractor") if source.exists() else None
    if saved is None:
        source = path.with_name("preprocessor_config.json")
        saved = read_object(source) if source.exists() else None
    where = path
    try:
        sizes = sizes_of_clap(fields)
        if saved is not None:
            where = source
            sizes["audio"] |= convert_front_end(saved, sizes["audio"])
    except (
        AttributeError,
        LookupError,
        TypeError,
        ArithmeticError,
    ) as error:  # fields of wrong types
        raise ValueError(f"{where}: can't be read: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if saved is None and os.environ.get("RANK") in (None, "0"):
        assumed = (
            "assuming LAION-CLAP's front end: 48 kHz, 10 s, window 1024, hop 480, 50 to 14,000 Hz"
        )
        print(
            f"note: no processor_config.json or preprocessor_config.json by {path}: {assumed}",
            file=sys.stderr,
        )
    return sizes
