"""torchaudio, and with it transformers, imports in plain Python beside a torch without CUDA, once set up."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.model.torchaudio_compat import fit_to_torch


def test_the_library_is_set_aside_and_back(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "_torchaudio.abi3.so"
    library.parent.mkdir()
    (library.with_name("libtorchaudio.abi3.so")).touch()
    library.write_text("first")
    aside = library.with_name("_torchaudio.abi3.so.needs_cuda")
    for has_cuda, renamed in ((True, []), (False, [aside]), (False, []), (True, [library]), (False, [aside])):
        assert fit_to_torch(tmp_path, has_cuda=has_cuda) == renamed
    library.write_text("a newer one, installed since")
    for has_cuda, renamed in ((True, []), (False, [aside])):
        assert fit_to_torch(tmp_path, has_cuda=has_cuda) == renamed
    assert aside.read_text().startswith("a newer one")


@pytest.mark.end_to_end
def test_transformers_is_whole_in_plain_python_once_set_up(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torchaudio")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "torchaudio"
    shutil.copytree(Path(spec.origin).parent, copy, copy_function=os.symlink)
    fit_to_torch(copy, has_cuda=True)  # as installed
    fit_to_torch(copy, has_cuda=torch.version.cuda is not None)
    program = "import torchaudio, transformers; print(torchaudio.__file__, transformers.ClapModel)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    finished = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(str(copy))
