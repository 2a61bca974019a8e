"""An item's text file becomes its captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clap_ds.config.files import parse_json
from clap_ds.data.broken import BrokenItemError

CAPTION_FORMATS = ("txt", "json")
CAPTION_FIELDS = ("caption", "text")
MOST_BYTES, MOST_CHARACTERS = 2**20, 2**16
"""Of the file, and of a caption: tokenizers take seconds for millions of characters, of which a model sees the first few."""


def captions_of(members: Mapping[str, Any]) -> list[str]:
    """The captions among an item's members: `txt`, or `caption` or `text` in `json`; empty ones are left out.

    Raises:
        BrokenItemError: none there, not UTF-8, not valid JSON, too long, or nothing but white space.
    """
    if not members.keys() & set(CAPTION_FORMATS):
        raise BrokenItemError("no caption (txt or json)")
    name = "txt" if "txt" in members else "json"
    if (size := len(members[name])) > MOST_BYTES:
        raise BrokenItemError(f"{name} has {size:,} bytes; expected at most {MOST_BYTES:,}")
    try:
        if name == "txt":
            captions: Any = members[name].decode("utf-8-sig")
        else:
            content = parse_json(members[name])
            field = next(name for name in CAPTION_FIELDS if isinstance(content, dict) and name in content)
            captions = content[field]
    except UnicodeDecodeError:
        raise BrokenItemError("caption isn't UTF-8") from None
    except ValueError as error:
        raise BrokenItemError(f"json isn't valid: {error}") from None
    except StopIteration:
        raise BrokenItemError("no caption in its json (field caption or text)") from None
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BrokenItemError(f"{field} in its json is neither a string nor a list of strings")
    if (longest := max(map(len, captions), default=0)) > MOST_CHARACTERS:
        raise BrokenItemError(f"a caption has {longest:,} characters; expected at most {MOST_CHARACTERS:,}")
    usable = [caption.strip() for caption in captions if caption.strip()]
    if not usable:
        raise BrokenItemError("empty caption")
    return usable
