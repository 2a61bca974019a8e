"""Preprocess the audio of shards for a model, so that runs needn't decode it.

Examples:
    clap-ds shards prepare 'shards/train-*.tar' mel --kind mel --preset htsat_tiny_roberta_base

Each output tar has the name, items and order of its input; only the audio changes. Unusable items
are skipped, counted and listed in `broken.jsonl`.
"""

import io
import math
import random
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from clap_ds.config.arguments import add_preset
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.data.build_shards import shard_writer
from clap_ds.data.build_shards.shard_writer import Member, Skipped
from clap_ds.data.clip import CLIP_FORMATS, FEATURES, choose_clip
from clap_ds.data.decoding import (
    AUDIO_FORMATS,
    BrokenItemError,
    check_samples,
    decode_part,
    mix,
    open_audio,
    repeat,
    resampling_ratio,
)
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import (
    HUB_TOKENIZER,
    expand_shards,
    fetch,
    front_end_of,
    list_items,
)
from clap_ds.model.mel import LogMel
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import leads_outside, replace_files


class EncodedClip(NamedTuple):
    extension: str
    content: bytes
    seconds: float


def keep_file(content: bytes, extension: str) -> EncodedClip:
    """Keep a file, or convert it to mono FLAC if training doesn't support its format. Raises
    BrokenItemError."""
    with open_audio(content) as file:
        sample_rate = file.samplerate
        num_expected = file.frames
        samples = file.read(dtype="float32", always_2d=True)
    # Checks the file, and is what FLAC stores.
    mono = np.empty(len(samples), np.float32)
    num_frames, is_silent = mix(samples, mono)
    check_samples(num_frames, num_expected, is_silent)
    if extension not in AUDIO_FORMATS:
        extension = "flac"
        content = _encode(mono, sample_rate, "FLAC")
    return EncodedClip(extension, content, num_frames / sample_rate)


class Preparation:
    """A conversion of audio files to kind `waveform`, or `mel` after repeating short clips."""

    def __init__(self, kind: Kind, audio: AudioConfig) -> None:
        self.audio = audio
        self.manifest_fields = (kind, front_end_of(audio))
        # The model's front end, with this project's CPU kernels.
        self._log_mel: LogMel | None = None
        if kind == "mel":
            self._log_mel = LogMel(audio)
            patch_model(self._log_mel)

    def convert(self, content: bytes, extension: str = "") -> EncodedClip:
        """Convert an audio file. Raises BrokenItemError."""
        sample_rate = self.audio.sample_rate
        clip_length = self.audio.num_samples
        with open_audio(content) as file:
            ratio = resampling_ratio(file.samplerate, sample_rate)
            max_samples = math.ceil(file.frames * ratio)
        # Not torch.zeros, whose error for too large a size isn't a MemoryError.
        row = torch.from_numpy(np.zeros(max(max_samples, clip_length), np.int16))
        # Nothing is drawn, because the row is as long as the file.
        rng = random.Random(0)
        num_samples = decode_part(content, row[:max_samples], sample_rate=sample_rate, rng=rng)
        seconds = num_samples / sample_rate
        if self._log_mel is None:
            return EncodedClip(
                "wav", _encode(row[:num_samples].numpy(), sample_rate, "WAV"), seconds
            )
        repeat(row[: max(num_samples, clip_length)].numpy(), num_samples)
        # Whole frames, so that crops at frames are features of crops.
        hop = self.audio.hop_size
        length = clip_length + max(num_samples - clip_length, 0) // hop * hop
        features = self._log_mel.of_any_length(row[None, :length])[0]
        numpy_file = io.BytesIO()
        np.save(numpy_file, features.half().numpy())
        return EncodedClip(FEATURES, numpy_file.getvalue(), seconds)


def _encode(samples: NDArray[Any], sample_rate: int, file_format: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, sample_rate, format=file_format, subtype="PCM_16")
    return file.getvalue()


KIND_DESCRIPTIONS = {
    "encoded": "the original files",
    "waveform": "16-bit mono WAV at the model's rate",
    "mel": "the model's float16 features",
}


def add_preparation_options(
    parser: ArgumentParser, kinds: tuple[Kind, ...], **options: Any
) -> None:
    group = parser.add_argument_group("preprocessing for a model")
    choices = "; ".join(f"{kind}: {KIND_DESCRIPTIONS[kind]}" for kind in kinds)
    group.add_argument("--kind", choices=kinds, help=f"store audio as this ({choices})", **options)
    add_preset(group, "prepare for this model")


def preparation_of(options: Namespace) -> Preparation | None:
    """Build the `Preparation` of these options; None for kind `encoded`. Raises UserError if they
    conflict."""
    if (options.kind == "encoded") == bool(options.preset):
        raise UserError(
            f"--kind {options.kind}: waveform and mel require a --preset (see `clap-ds "
            "presets`); encoded takes none"
        )
    if not options.preset:
        return None
    audio = load_preset(options.preset).audio
    if options.kind == "mel" and audio.fusion:
        raise UserError(
            f"--kind mel: {options.preset} has feature fusion: expected --kind waveform"
        )
    return Preparation(options.kind, audio)


def add_prepare_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS",
        help="tars: paths, patterns or URLs, as in clap.data.shards",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume"
    )
    add_preparation_options(parser, ("waveform", "mel"), required=True)
    shard_writer.add_work_options(parser)


def run_prepare(options: Namespace) -> int:
    """Prepare shards and return the exit code."""
    preparation = preparation_of(options)
    # `encoded` isn't among the choices.
    assert preparation is not None
    folder_pattern = shard_writer.enter_part(options)
    folder = options.folder
    # All names, because parts are read as one data set.
    named_tars = [*_output_names(expand_shards(options.shards)).items()]
    tars = dict(shard_writer.take_part(named_tars, options))
    records, skipped = shard_writer.write_shards(
        folder,
        tars.values(),
        {name: partial(members_of, tar, preparation) for name, tar in tars.items()},
        options.workers,
        preparation.manifest_fields,
    )
    shard_writer.print_amount(options.kind, [*records.values()])
    tokenizer = HUB_TOKENIZER
    source_tokenizer = Path(next(iter(tars.values()))).parent / "tokenizer"
    if source_tokenizer.is_dir() and not leads_outside(source_tokenizer, source_tokenizer.parent):
        tokenizer = str(folder / "tokenizer")
        _copy_tokenizer(source_tokenizer, folder / "tokenizer")
    shard_writer.print_settings(f"{folder_pattern}/*.tar", tokenizer, options.preset)
    return shard_writer.print_skipped(folder, records.values(), skipped, options.max_left_out)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a folder without links that lead out of it."""

    def find_outside(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if leads_outside(Path(folder, name), source)]

    with replace_files(target) as draft:
        shutil.copytree(source, draft, ignore=find_outside, dirs_exist_ok=True)


def members_of(tar: str, preparation: Preparation, skipped: list[Skipped]) -> Iterator[Member]:
    """Yield the prepared items of a tar (path or URL), and add unusable ones to `skipped`."""
    for item in list_items(tar, lambda name, reason: skipped.append((name, reason))):
        try:
            fetch(item)
            clip = preparation.convert(choose_clip(item, "encoded"))
        except BrokenItemError as error:
            skipped.append((f"{tar}: {item['__key__']}", str(error)))
            continue
        prepared = {"__key__": item["__key__"], clip.extension: clip.content}
        for extension, content in item.items():
            # Names that start with "_" are WebDataset's own, and tars can't have empty ones.
            if extension not in CLIP_FORMATS and extension[:1] not in ("", "_"):
                prepared[extension] = content
        yield prepared, clip.seconds


def _output_names(tars: Iterable[str]) -> dict[str, str]:
    """Return tars by the file names of their prepared shards."""
    by_name: dict[str, str] = {}
    for tar in tars:
        name = tar.rpartition("/")[2].partition(".tar")[0] + ".tar"
        if by_name.setdefault(name, tar) != tar:
            raise UserError(
                f"{by_name[name]} and {tar} would both become {name}; prepare them into "
                "separate folders"
            )
    return by_name
