"""CLAP training and throughput on the DeepSpeed engine; `clap_ds.load` gives a trained model to embed and classify with."""

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: clap_ds needs Python 3.11 or newer; this is {sys.version.split()[0]}")

from clap_ds.config.paths import VERSION as __version__  # noqa: F401, N811

if TYPE_CHECKING:
    from clap_ds.inference.model import load as load


def __getattr__(name: str) -> Any:
    """`load`, whose import takes the seconds that torch does, once it is asked for."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clap_ds.inference.model import load

    return load


def __dir__() -> list[str]:
    return [*globals(), "load"]
