"""Makes torchaudio importable beside any build of torch; the one place this project imports it from.

    python -m clap_ds.model.torchaudio_compat    sets torchaudio's compiled library aside where torch has no CUDA

torchaudio's wheels carry compiled libraries linked against CUDA, so `import torchaudio` fails beside a CPU-only torch, and
with it much of `transformers`. Nothing that this project uses is in those libraries, and torchaudio does without where it finds
none. `make setup` therefore runs the command above. In other environments a stand-in for the module that loads the libraries is
registered first: import this module before `transformers`.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch


def set_aside(torchaudio_folder: Path) -> list[Path]:
    """Rename torchaudio's compiled library; what it is called now. Raises OSError if it can't."""
    found = sorted((torchaudio_folder / "lib").glob("_torchaudio*.so"))
    return [path.replace(f"{path}.needs_cuda") for path in found]


if torch.version.cuda is None:
    stand_in: Any = types.ModuleType("torchaudio._extension", "Stand-in: torchaudio without its compiled libraries.")
    stand_in._IS_TORCHAUDIO_EXT_AVAILABLE = stand_in._IS_ALIGN_AVAILABLE = False
    stand_in.fail_if_no_align = lambda function: function  # which fails without its library
    sys.modules.setdefault(stand_in.__name__, stand_in)

import torchaudio  # noqa: E402

__all__ = ["torchaudio"]

if __name__ == "__main__" and torch.version.cuda is None:
    for path in set_aside(Path(torchaudio.__file__).parent):
        print(f"torchaudio's compiled library is set aside, as this torch has no CUDA: {path}")
