"""Find the audio files and clips of shards in a command's arguments. Imports torch only for shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from clap_ds.config.errors import UserError
from clap_ds.data.build_shards.caption_lists import AUDIO_SUFFIXES, LIST_SUFFIXES, audio_files_in, read_paths
from clap_ds.inference.vectors import text_of

if TYPE_CHECKING:
    from clap_ds.data.clip import Broken
    from clap_ds.evaluation.clips import Clip

Found: TypeAlias = "Path | Clip | Broken"


def find_sources(inputs: Sequence[str]) -> dict[str, Found]:
    """Find audio files and clips in folders (recursively), lists and tars (paths, patterns, URLs), in order, each once,
    by path or `tar: key`. Raises UserError or ValueError for a missing or empty argument."""
    found: dict[str, Found] = {}
    for argument in inputs:
        for source in _sources_in(argument):
            found.setdefault(text_of(source if isinstance(source, Path) else source.name), source)
    return found


def _sources_in(argument: str) -> Iterable[Found]:
    path, suffix = Path(argument), Path(argument).suffix.lower()
    if path.is_dir():
        return audio_files_in(path)
    if suffix == ".tar" or "://" in argument:
        from clap_ds.data.shard_manifest import expand_shards
        from clap_ds.evaluation.clips import list_clips

        clips, broken = list_clips(expand_shards(argument))
        return [*clips, *broken]
    if suffix in LIST_SUFFIXES and path.exists():
        return read_paths(path)
    if suffix in AUDIO_SUFFIXES and path.exists():
        return [path]
    kinds = f"a folder, audio ({', '.join(AUDIO_SUFFIXES)}), a list ({', '.join(LIST_SUFFIXES)}) or .tar"
    raise UserError(f"{argument}: {'' if path.exists() else 'no such file or folder; '}expected {kinds}")
