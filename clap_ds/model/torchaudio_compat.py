"""Makes torchaudio importable beside any build of torch; the one place this project imports it from.

    python -m clap_ds.model.torchaudio_compat    sets torchaudio's compiled library aside where torch has no CUDA

torchaudio's wheels carry compiled libraries linked against CUDA, so `import torchaudio` fails beside a CPU-only torch, and
with it much of `transformers`, which imports torchaudio where it is installed. None of what this project uses (mel filters,
STFT, resampling) is in those libraries, and torchaudio does without where it finds none. `make setup` therefore runs the
command above on its own environment, where every other program then works, too. In an environment that isn't this project's
to change, a stand-in for the module that loads the libraries is registered first: import this module before `transformers`.
Everything else about torchaudio is left as it is.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_EXTENSION = "torchaudio._extension"


def set_aside(torchaudio_folder: Path) -> list[Path]:
    """Rename torchaudio's compiled library; what it is called now. Raises OSError if it can't."""
    found = sorted((torchaudio_folder / "lib").glob("_torchaudio*.so"))
    return [path.replace(f"{path}.needs_cuda") for path in found]


def _needs_alignment_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a function that calls the compiled library: says so when it is called."""

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torchaudio's {function.__name__} needs its compiled library, which needs a CUDA build of torch"
        )

    return refuse


def _stand_in() -> types.ModuleType:
    extension = types.ModuleType(_EXTENSION, "Stand-in: torchaudio without its compiled libraries.")
    vars(extension).update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False, _IS_ALIGN_AVAILABLE=False, fail_if_no_align=_needs_alignment_library
    )
    return extension


if torch.version.cuda is None:
    sys.modules.setdefault(_EXTENSION, _stand_in())

import torchaudio  # noqa: E402

__all__ = ["torchaudio"]

if __name__ == "__main__" and torch.version.cuda is None:
    for path in set_aside(Path(torchaudio.__file__).parent):
        print(f"torchaudio's compiled library is set aside, as this torch has no CUDA: {path}")
