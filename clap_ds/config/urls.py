"""URLs of files: which fields of a run take them, and what is wrong with one.

`fsspec` has a file system for each protocol (s3://, gs://, https://, hf://, …). Some need packages,
which extras install. Nothing here connects to a server, so that a run is checked before its ranks
start. Credentials come only from the environment: in a URL, they would appear in logs and records.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import fsspec

from clap_ds.config.arguments import find_field
from clap_ds.utils.errors import did_you_mean, how_to_install
from clap_ds.utils.redaction import redact_urls

LOCAL = "file://"
# fields of `clap` that take URLs
FIELDS = (
    "data.shards",
    "evaluation.retrieval.shards",
    "evaluation.zero_shot.shards",
    "train.pretrained",
    "train.resume",
    "checkpoint.remote_sync",
)
# fields whose URL would be taken for a path in the working folder
PATH_FIELDS = {
    "data.tokenizer": "a folder or a name on the Hub",
    "evaluation.tokenizer": "a folder or a name on the Hub",
    "checkpoint.folder": "a folder; clap.checkpoint.remote_sync copies to URLs",
    "output.dir": "a folder; clap.checkpoint.remote_sync copies to URLs",
}


def is_remote(path: str) -> bool:
    return "://" in path or "::" in path


def last_part(url: str) -> str:
    """Return the name of the file or folder at a URL, without a query."""
    return urlsplit(url).path.rstrip("/").rpartition("/")[2]


def check_url(url: str) -> None:
    """Raise ValueError for a URL that contains credentials or that fsspec can't open."""
    for address in map(urlsplit, url.split("::")):
        # Of other schemes, a user alone is the name of a container.
        has_secret = address.password is not None or address.scheme in ("http", "https", "ftp")
        if "@" in address.netloc and has_secret:
            raise ValueError(
                f"the {address.scheme} URL of {address.hostname} contains credentials, "
                "which would appear in logs and records; set them in the environment"
            )
        problem = f"{redact_urls(url)}: {address.scheme}://"
        try:
            fsspec.get_filesystem_class(address.scheme)
        except ImportError as error:
            raise ValueError(f"{problem} needs another package{how_to_install(error)}") from None
        except ValueError:
            hint = did_you_mean(address.scheme, fsspec.available_protocols(), most_listed=0)
            raise ValueError(f"{problem} is no known protocol{hint}") from None


def find_url_problems(clap: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the URLs in a run's section `clap`."""
    for field in FIELDS:
        value = find_field(clap, field) or ()
        # The patterns of a mixture are its keys.
        for url in [value] if isinstance(value, str) else value:
            try:
                if is_remote(url):
                    check_url(url)
            except ValueError as error:
                yield f"clap.{field}: {error}"
    for field, expected in PATH_FIELDS.items():
        value = find_field(clap, field) or ""
        if is_remote(value):
            yield f"clap.{field}: expected {expected}, found the URL {redact_urls(value)}"
