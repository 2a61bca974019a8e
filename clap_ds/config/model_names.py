"""Names of model presets. Standard library only."""

from __future__ import annotations

from pathlib import Path

PRESET_DIR = Path(__file__).with_name("presets")


def list_presets() -> list[str]:
    """List all presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def find_preset(name: str) -> str:
    """Return the preset of a published (`HTSAT-tiny-Roberta-base`) or open_clip name
    (`CLAP-HTSAT-base-Roberta-base`), or the name itself if there is none."""
    presets = list_presets()
    snake_case = name.casefold().replace("-", "_")
    if snake_case in presets:
        return snake_case
    # Some of open_clip's `CLAP-` names are separate models, others the same as without it.
    without_prefix = snake_case.removeprefix("clap_")
    return without_prefix if without_prefix in presets else name
