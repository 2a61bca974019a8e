"""torchaudio, and with it transformers, imports in plain Python beside a torch without CUDA, once set up."""

from pathlib import Path

from clap_ds.model.torchaudio_compat import set_aside


def test_the_library_is_set_aside_once_for_each_installed(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    library, aside = (tmp_path / "lib" / f"_torchaudio.abi3.so{end}" for end in ("", ".needs_cuda"))
    for installed in ("first", "a newer one, installed since"):
        library.write_text(installed)
        assert set_aside(tmp_path) == [aside]
        assert set_aside(tmp_path) == []
        assert aside.read_text() == installed
