"""Redact secrets in options and URLs from records, logs and reports, which people share.

Credentials belong in the environment, which isn't recorded. Patterns take time in proportion to the
text. Each begins where a name or an address begins, and a character is part of only one. Standard
library only.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[hidden]"
# Words in names of secrets. A tokenizer's special tokens, such as `pad_token`, are none.
_WORDS = (
    r"(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token(?!s|i|_type|_id)|secret|passw(?:or)?d|passphrase"
    r"|credential|signature|(?:api|access|account|auth|private|shared|storage|wandb|encryption)[._-]?key"
    r"|(?<![a-z0-9])(?:sig|sas)(?![a-z0-9])"
)
# a name that contains one of the words: of an option (with its dashes), a variable or a field
_NAME = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]++"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_VALUE = r"(?:(?<=['\"])[^\0\n'\"]+|[^\s\0'\",]+)"
_QUERY = re.compile(r"\?[^\s\0'\"]+")
_SECRET_PARAMETER = re.compile(rf"{_NAME}=", re.IGNORECASE)
_PATTERNS = (
    # Azure's addresses are abfs://container@account/….
    re.compile(r"((?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)://)(?!git@)(?:[^\s/?#@\0'\"]*@)*[^\s/?#@\0'\"]+(?=@)"),
    re.compile(rf"((?<![\w.-])-(?=[\w.-]*?(?:{_WORDS}))[\w.-]++[ \0]['\"]?)(?!-){_VALUE}", re.IGNORECASE),
    re.compile(rf"({_NAME}['\"]?(?:=|: ?)['\"]?){_VALUE}", re.IGNORECASE),
    re.compile(rf"(\b(?:Bearer |Basic (?=[\w+/=]{{16}}))){_VALUE}"),
    re.compile(
        r"()(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}"
        r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|(?<![\w-])(?:eyJ[\w-]{8,}\.[\w.-]+|sk-[\w-]{20,}))"
    ),
)  # fmt: skip


def redact(text: str) -> str:
    """Replace what looks like a secret by `[hidden]`: `--hf_token=…`, `HF_TOKEN=…`, `password: …`,
    a presigned URL's parameters, `://user:password@`, and keys that begin like those of well-known
    services."""
    text = redact_urls(text)
    for pattern in _PATTERNS[1:]:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def redact_urls(text: str) -> str:
    """Replace only users and signatures of URLs by `[hidden]`, in messages, where `token: missing`
    states a problem and no secret."""
    text = _QUERY.sub(_redact_query, text)
    return _PATTERNS[0].sub(rf"\1{HIDDEN}", text)


def _redact_query(match: re.Match[str]) -> str:
    return f"?{HIDDEN}" if _SECRET_PARAMETER.search(match[0]) else match[0]


def redact_all(content: Any, name: str = "") -> Any:
    """Redact all strings of a JSON value.

    Args:
        name: the value's field after its section's, such as `wandb.api_key`. All strings in a
            field with the name of a secret are hidden whole.
    """
    field = name.rpartition(".")[2]
    is_secret = bool(_SECRET_NAME.fullmatch(name) or _SECRET_NAME.fullmatch(field))
    if isinstance(content, str):
        return HIDDEN if is_secret else redact(content)
    if isinstance(content, dict):
        return {
            redact_all(key): redact_all(value, f"{field}.{key}") for key, value in content.items()
        }
    if not isinstance(content, list | tuple):
        return content
    is_command = content and all(isinstance(word, str) for word in content)
    if is_command and not is_secret:
        # In a command a secret may follow its option.
        return redact("\0".join(content)).split("\0")
    return [redact_all(item, name) for item in content]
