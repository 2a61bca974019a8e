"""Train, benchmark and use CLAP models on DeepSpeed; `clap_ds.load` returns a trained model for
embedding and labels."""

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: clap_ds requires Python 3.11 or newer, found {sys.version.split()[0]}")

from clap_ds.utils.paths import VERSION as __version__  # noqa: F401, N811

if TYPE_CHECKING:
    from clap_ds.inference.model import load as load


def __getattr__(name: str) -> Any:
    """Import `load` on first use: its torch import takes seconds."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clap_ds.inference.model import load

    return load


def __dir__() -> list[str]:
    return [*globals(), "load"]
