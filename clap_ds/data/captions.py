"""Check and convert the text of captions."""

from __future__ import annotations

from collections.abc import Collection


def in_words(name: str) -> str:
    """Convert a class name to caption words: `low_hum` becomes "low hum". Text with spaces is unchanged."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def monotony(captions: Collection[object]) -> str:
    """Return a warning if captions, one per clip, are all equal or fewer than 2% are distinct; else an empty string."""
    num_different, num_clips = len(set(captions)), len(captions)
    if num_clips < 2 or num_different >= max(2, 0.02 * num_clips):
        return ""
    return f"only {num_different:,} different caption(s) among {num_clips:,} clips; check the caption source"
