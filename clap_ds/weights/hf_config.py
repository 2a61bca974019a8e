"""Convert model sizes to a `transformers.ClapConfig`, rejecting what it can't express."""

from clap_ds.config.clap_json import AUDIO, FIXED_AUDIO, FIXED_TEXT, FRONT_END, TEXT
from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)
from clap_ds.weights.key_mapping import refuse

import transformers  # isort: skip


def config_to_transformers(config: ClapConfig) -> transformers.ClapConfig:
    """Return a model's `transformers.ClapConfig`. Raises ValueError if there is none."""
    audio = config.audio
    text = config.text
    head = config.audio.projection
    problems = {
        f"its text tower is a {text.architecture} with pooling {text.pooling!r}, not a roberta with 'cls_pooler'":
            (text.architecture, text.pooling) != ("roberta", "cls_pooler"),
        f"its projections aren't equal and {config.joint_dim} wide, with biases":
            head != text.projection or head.hidden_dim != config.joint_dim or not head.bias,
        "a token grid is smaller than the window": min(audio.stage_grids) < audio.attention_window,
        "its clips aren't whole seconds": audio.num_samples % audio.sample_rate != 0,
    }  # fmt: skip
    refuse(config, "a transformers.ClapModel", problems)
    return transformers.ClapConfig(
        audio_config={
            **FIXED_AUDIO,
            **{theirs: getattr(audio, ours) for ours, theirs in AUDIO.items()},
            "patch_size": audio.patch_size,
            "patch_stride": [audio.patch_size, audio.patch_size],
            "hidden_size": audio.output_dim,
            "num_hidden_layers": audio.num_stages,
            "mlp_ratio": float(audio.mlp_ratio),
        },
        text_config={
            **FIXED_TEXT,
            **{theirs: getattr(text, ours) for ours, theirs in TEXT.items()},
            "layer_norm_eps": text.layer_norm_eps,
        },
        projection_dim=config.joint_dim,
        projection_hidden_act=audio.projection.activation,
    )


def feature_extractor(config: AudioConfig) -> transformers.ClapFeatureExtractor:
    """Return the transformers front end. Without feature fusion it could only crop longer clips at
    random, so it rejects them with the error "data_truncating", `cropping`, "not implemented"."""
    cropping = "of longer clips (crop them first, or set truncation='rand_trunc' for random crops)"
    return transformers.ClapFeatureExtractor(
        feature_size=config.mel_bins,
        max_length_s=config.num_samples // config.sample_rate,
        truncation="fusion" if config.fusion else cropping,
        padding="repeatpad",
        **{theirs: getattr(config, ours) for ours, theirs in FRONT_END.items()},
    )
