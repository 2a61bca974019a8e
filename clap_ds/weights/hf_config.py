"""Between this project's model sizes and `transformers.ClapConfig`: what either can't express is refused with the reason.

Sizes only; the tensors are `clap_ds.weights.formats`'.
"""

from typing import Any

from clap_ds.config.model import PAD_TOKEN_ID, AudioConfig, ClapConfig, ProjectionConfig, TextConfig, load_preset
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio where it is installed)

import transformers  # isort: skip

# What HTSAT and RoBERTa here are, whatever their sizes.
_FIXED_AUDIO = {
    "hidden_act": "gelu",
    "qkv_bias": True,
    "patch_embed_input_channels": 1,
    "flatten_patch_embeds": True,
    "enable_patch_layer_norm": True,
    "layer_norm_eps": 1e-5,
}
_FIXED_TEXT = {"hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": PAD_TOKEN_ID}
# Our field → theirs, in one of transformers' objects each.
_AUDIO = {
    "attention_window": "window_size",
    "mel_bins": "num_mel_bins",
    "image_size": "spec_size",
    "embed_dim": "patch_embeds_hidden_size",
    "depths": "depths",
    "num_heads": "num_attention_heads",
    "num_classes": "num_classes",
    "fusion": "enable_fusion",
}
_OF_FUSION: dict[str, list[Any]] = {"fusion_type": [None, "aff_2d"], "aff_block_r": [4]}
_TEXT = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
_FRONT_END = {
    "sample_rate": "sampling_rate",
    "stft_window": "fft_window_size",
    "hop_size": "hop_length",
    "fmin": "frequency_min",
    "fmax": "frequency_max",
}


def read_sizes(fields: dict[str, Any]) -> transformers.ClapConfig:
    """Of a `config.json`, what is looked at here: of the rest, a number of labels becomes as many names."""
    audio = {*_FIXED_AUDIO, *_OF_FUSION, *_AUDIO.values(), "patch_size", "patch_stride", "mlp_ratio"}
    known = {"audio_config": audio, "text_config": {*_FIXED_TEXT, *_TEXT.values(), "layer_norm_eps"}}
    sizes: dict[str, Any] = {
        name: fields[name] for name in ("projection_dim", "projection_hidden_act") if name in fields
    }
    for name, names in known.items():
        sizes[name] = {each: value for each, value in fields.get(name, {}).items() if each in names}
    return transformers.ClapConfig.from_dict(sizes)


def config_from_transformers(
    config: transformers.ClapConfig, front_end: dict[str, Any], *, name: str = "transformers"
) -> ClapConfig:
    """The sizes of an HF CLAP.

    Args:
        front_end: fields of its `preprocessor_config.json`; LAION-CLAP's front end (48 kHz, 10 s, 50-14000 Hz) where absent.
        name: what to call the model in messages.

    Raises:
        ValueError: another kind of feature fusion, or another architecture than HTSAT + RoBERTa; names the field.
    """
    audio: Any = config.audio_config
    text: Any = config.text_config
    activation: Any = config.projection_hidden_act
    patch, ratio = _side(audio.patch_size), audio.mlp_ratio
    checks: list[tuple[str, Any, list[Any]]] = [
        *((f"audio_config.{fixed}", getattr(audio, fixed), [value]) for fixed, value in _FIXED_AUDIO.items()),
        *((f"text_config.{fixed}", getattr(text, fixed), [value]) for fixed, value in _FIXED_TEXT.items()),
        *(
            (f"audio_config.{its}", getattr(audio, its), values)
            for its, values in _OF_FUSION.items()
            if audio.enable_fusion
        ),
        ("audio_config.patch_stride", _side(audio.patch_stride), [patch]),
        ("audio_config.mlp_ratio", ratio, [round(ratio)]),
        ("projection_hidden_act", activation, ["relu", "gelu"]),
    ]
    for field, found, expected in checks:
        if found not in expected:
            only = " or ".join(map(repr, expected))
            raise ValueError(f"{name}: {field} is {found!r}, only {only} is supported")
    published = load_preset("htsat_tiny_roberta_base")
    projection = ProjectionConfig(hidden_dim=config.projection_dim, activation=activation, bias=True)
    audio_sizes: dict[str, Any] = {ours: getattr(audio, theirs) for ours, theirs in _AUDIO.items()}
    audio_sizes |= {ours: front_end.get(theirs, getattr(published.audio, ours)) for ours, theirs in _FRONT_END.items()}
    audio_sizes |= {ours: list(audio_sizes[ours]) for ours in ("depths", "num_heads")}
    seconds = front_end.get("max_length_s", published.audio.num_samples // published.audio.sample_rate)
    audio_sizes |= {"patch_size": patch, "mlp_ratio": round(ratio), "num_samples": seconds * audio_sizes["sample_rate"]}
    text_sizes: dict[str, Any] = {ours: getattr(text, theirs) for ours, theirs in _TEXT.items()}
    is_roberta_base = all(getattr(published.text, ours) == value for ours, value in text_sizes.items())
    text_sizes |= {
        "hub_name": published.text.hub_name if is_roberta_base else "",
        "layer_norm_eps": text.layer_norm_eps,
    }
    return ClapConfig(
        name=name,
        audio=AudioConfig(**audio_sizes, projection=projection),
        text=TextConfig(**text_sizes, pooling="cls_pooler", projection=projection),
        joint_dim=config.projection_dim,
    )


def config_to_transformers(config: ClapConfig) -> transformers.ClapConfig:
    """The `transformers.ClapConfig` of sizes that `clap_ds.weights.expressible` gives; raises ValueError where `ClapModel` has
    no such sizes, which is so for no preset."""
    audio, text = config.audio, config.text
    for is_wrong, reason in (
        (audio.projection.activation != text.projection.activation, "its projections have different activations"),
        (min(audio.stage_grids) < audio.attention_window, "its last token grid is smaller than the window"),
        (audio.num_samples % audio.sample_rate, "its clips are not whole seconds"),
    ):
        if is_wrong:
            raise ValueError(f"{config.name} can't be a transformers.ClapModel: {reason}")
    return transformers.ClapConfig(
        audio_config={
            **_FIXED_AUDIO,
            **{theirs: getattr(audio, ours) for ours, theirs in _AUDIO.items()},
            "patch_size": audio.patch_size,
            "patch_stride": [audio.patch_size, audio.patch_size],
            "hidden_size": audio.output_dim,
            "num_hidden_layers": audio.num_stages,
            "mlp_ratio": float(audio.mlp_ratio),
        },
        text_config={
            **_FIXED_TEXT,
            **{theirs: getattr(text, ours) for ours, theirs in _TEXT.items()},
            "layer_norm_eps": text.layer_norm_eps,
        },
        projection_dim=config.joint_dim,
        projection_hidden_act=audio.projection.activation,
    )


def feature_extractor(config: AudioConfig) -> transformers.ClapFeatureExtractor:
    """The HF front end with this model's mel settings. Without feature fusion it could crop longer clips at random alone, and
    so refuses them: its error is "data_truncating", what is said here, and "not implemented"."""
    cropping = "of longer clips (crop them first, or say truncation='rand_trunc' for crops at random)"
    return transformers.ClapFeatureExtractor(
        feature_size=config.mel_bins,
        max_length_s=config.num_samples // config.sample_rate,
        truncation="fusion" if config.fusion else cropping,
        padding="repeatpad",
        **{theirs: getattr(config, ours) for ours, theirs in _FRONT_END.items()},
    )


def _side(size: Any) -> int:
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise ValueError(f"patches must be square, got {list(size)}")
    return int(size[0])
