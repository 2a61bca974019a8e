"""Names of presets. Standard library only."""

from __future__ import annotations

from pathlib import Path

PRESET_DIR = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    """List all presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def preset_of(name: str) -> str:
    """Map a published (`HTSAT-tiny-Roberta-base`) or open_clip name
    (`CLAP-HTSAT-base-Roberta-base`) to its preset, if any. Some of open_clip's `CLAP-` names are
    separate models, others the same as without it."""
    plain = name.casefold().replace("-", "_")
    known = preset_names()
    return next((each for each in (plain, plain.removeprefix("clap_")) if each in known), name)
