"""Makes torchaudio importable beside any build of torch; the one place this project imports it from.

torchaudio's wheels carry compiled libraries linked against CUDA, so `import torchaudio` fails beside a CPU-only torch.
None of what this project uses (mel filters, STFT, resampling) is in those libraries. Beside a CPU-only torch a stand-in
for the module that loads them is therefore registered first. `transformers` imports torchaudio too when it finds it
installed: import this module before `transformers`. Everything else about torchaudio is left as it is.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_EXTENSION = "torchaudio._extension"


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
