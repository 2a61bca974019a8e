"""torchaudio, and with it transformers, imports in plain Python beside a torch without CUDA, once set up."""

from pathlib import Path

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
