"""Redact secrets in options and URLs from records, logs and reports, which people share.

Credentials belong in the environment, which isn't recorded. Standard library only.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[hidden]"
_SECRET = r"[\w.-]*(?:token(?!s|i)|secret|passw(?:or)?d|credential|signature|api[_-]?key|access[_-]?key|\bsig\b)[\w.-]*"
_VALUE = r"[^\s\0'\",]+"
_PATTERNS = (
    rf"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*\?)(?=[^\s'\"]*{_SECRET}=){_VALUE}",
    r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]*:[^\s/'\"]*(?=@)",
    rf"(--?{_SECRET}[= \0]['\"]?)(?!-){_VALUE}",
    r"()\b(?-i:hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b",
    rf"(\b(?-i:[A-Z][A-Z0-9_]*(?:TOKEN(?!S|I)|SECRET|PASSWORD|API_KEY|ACCESS_KEY)[A-Z0-9_]*=|Bearer )){_VALUE}",
)


def redacted(text: str) -> str:
    """Replace what looks like a secret by `[hidden]`: `--hf_token=…`, `HF_TOKEN=…`, a presigned URL's parameters,
    `://user:password@`."""
    for pattern in _PATTERNS:
        text = re.sub(pattern, rf"\1{HIDDEN}", text, flags=re.IGNORECASE)
    return text


def redacted_all(content: Any) -> Any:
    """Redact all strings of a JSON value."""
    if isinstance(content, str):
        return redacted(content)
    if isinstance(content, dict):
        hidden = lambda name, value: isinstance(value, str) and re.fullmatch(_SECRET, name, re.IGNORECASE)  # noqa: E731
        return {redacted_all(k): HIDDEN if hidden(str(k), v) else redacted_all(v) for k, v in content.items()}
    if isinstance(content, list | tuple):
        is_command = content and all(isinstance(each, str) for each in content)
        # In a command a secret may follow its option.
        return redacted("\0".join(content)).split("\0") if is_command else [*map(redacted_all, content)]
    return content
