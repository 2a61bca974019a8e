"""Make torchaudio importable with any build of torch. Import torchaudio only from here, and before
`transformers`.

    python -m clap_ds.model.torchaudio_compat   rename torchaudio's compiled library if torch has no CUDA

torchaudio's wheels contain libraries linked against CUDA. With a CPU-only torch `import
torchaudio`, and much of `transformers`, fails. This project needs none of these libraries, and
torchaudio works without them, so `make setup` runs the command above. In other environments this
module registers a stand-in for the module that loads them.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch


def set_aside(torchaudio_folder: Path) -> list[Path]:
    """Rename torchaudio's compiled library and return the new paths. Raises OSError if that
    fails."""
    libraries = sorted((torchaudio_folder / "lib").glob("_torchaudio*.so"))
    return [library.replace(f"{library}.needs_cuda") for library in libraries]


if torch.version.cuda is None:
    # torchaudio imports this module for its flags, and doesn't need more of it.
    stand_in: Any = types.ModuleType(
        "torchaudio._extension", "Stand-in: torchaudio without its compiled libraries."
    )
    stand_in._IS_TORCHAUDIO_EXT_AVAILABLE = stand_in._IS_ALIGN_AVAILABLE = False
    stand_in.fail_if_no_align = lambda function: function  # fails without the library
    sys.modules.setdefault(stand_in.__name__, stand_in)

import torchaudio  # noqa: E402

__all__ = ["torchaudio"]

if __name__ == "__main__" and torch.version.cuda is None:
    for path in set_aside(Path(torchaudio.__file__).parent):
        print(f"renamed torchaudio's compiled library because this torch has no CUDA: {path}")
