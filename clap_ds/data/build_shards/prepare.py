"""Preprocess the audio of shards for a model, so that runs needn't decode it.

Examples:
    clap-ds shards prepare 'shards/train-*.tar' mel --kind mel --preset htsat_tiny_roberta_base

Each output tar has the name, items and order of its input; only the audio changes. Unusable items
are skipped, counted and listed in `broken.jsonl`.
"""

from __future__ import annotations

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
from clap_ds.data.build_shards.shard_writer import Member, Named
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
from clap_ds.utils.files import leads_outside, replacing_files


class EncodedClip(NamedTuple):
    extension: str
    content: bytes
    seconds: float


def as_it_is(content: bytes, extension: str) -> EncodedClip:
    """Keep a file, or convert it to mono FLAC if training doesn't support its format. Raises
    BrokenItemError."""
    with open_audio(content) as file:
        rate = file.samplerate
        expected = file.frames
        samples = file.read(dtype="float32", always_2d=True)
    mono = np.empty(len(samples), np.float32)
    num_frames, is_silent = mix(samples, mono)
    check_samples(num_frames, expected, is_silent)
    if extension not in AUDIO_FORMATS:
        extension = "flac"
        content = _encoded(mono, rate, "FLAC")
    return EncodedClip(extension, content, num_frames / rate)


class Preparation:
    """Convert audio files to kind `waveform`, or `mel` after repeating short clips."""

    def __init__(self, kind: Kind, audio: AudioConfig) -> None:
        self.audio = audio
        self.described = (kind, front_end_of(audio))
        self._log_mel = LogMel(audio) if kind == "mel" else None
        if self._log_mel:
            patch_model(self._log_mel)

    def clip(self, content: bytes, extension: str = "") -> EncodedClip:
        """Convert an audio file. Raises BrokenItemError."""
        rate = self.audio.sample_rate
        length = self.audio.num_samples
        hop = self.audio.hop_size
        with open_audio(content) as file:
            num_samples = math.ceil(file.frames * resampling_ratio(file.samplerate, rate))
            row = torch.from_numpy(
                np.zeros(max(num_samples, length), np.int16)
            )  # torch's error isn't a MemoryError
        found = decode_part(content, row[:num_samples], sample_rate=rate, rng=random.Random(0))
        if self._log_mel is None:
            return EncodedClip("wav", _encoded(row[:found].numpy(), rate, "WAV"), found / rate)
        repeat(row[: max(found, length)].numpy(), found)
        whole = length + max(found - length, 0) // hop * hop  # uncropped
        np.save(
            features := io.BytesIO(),
            self._log_mel.of_any_length(row[None, :whole])[0].half().numpy(),
        )
        return EncodedClip(FEATURES, features.getvalue(), found / rate)


def _encoded(samples: NDArray[Any], rate: int, file_format: str) -> bytes:
    soundfile.write(file := io.BytesIO(), samples, rate, format=file_format, subtype="PCM_16")
    return file.getvalue()


ABOUT_KINDS = {
    "encoded": "the original files",
    "waveform": "16-bit mono WAV at the model's rate",
    "mel": "the model's float16 features",
}


def add_preparation_options(parser: ArgumentParser, kinds: tuple[Kind, ...], **more: Any) -> None:
    group = parser.add_argument_group("preprocessing for a model")
    choices = "; ".join(f"{kind}: {ABOUT_KINDS[kind]}" for kind in kinds)
    group.add_argument("--kind", choices=kinds, help=f"store audio as this ({choices})", **more)
    add_preset(group, "prepare for this model")


def preparation_of(options: Namespace) -> Preparation | None:
    """Build the `Preparation` of these options; None for kind `encoded`. Raises UserError if they
    conflict."""
    if (options.kind == "encoded") == bool(options.preset):
        raise UserError(
            f"--kind {options.kind}: waveform and mel require a --preset (see `clap-ds presets`); encoded takes none"
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
    more = "tars: paths, patterns or URLs, as in clap.data.shards"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=more)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume"
    )
    add_preparation_options(parser, ("waveform", "mel"), required=True)
    shard_writer.add_work(parser)


def run_prepare(options: Namespace) -> int:
    """Prepare shards and return the exit code."""
    preparation = preparation_of(options)
    assert preparation is not None  # `encoded` isn't among the choices
    tars = _by_name(expand_shards(options.shards))
    folder = options.folder
    members = {name: partial(members_of, tar, preparation) for name, tar in tars.items()}
    work = members, options.workers, preparation.described
    records, broken = shard_writer.write_shards(folder, tars.values(), *work)
    shard_writer.print_amount(options.kind, [*records.values()])
    beside = Path(next(iter(tars.values()))).parent / "tokenizer"
    tokenizer = HUB_TOKENIZER
    if beside.is_dir() and not leads_outside(beside, beside.parent):

        def outside(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if leads_outside(Path(folder, name), beside)]

        tokenizer = str(folder / beside.name)
        with replacing_files(folder / beside.name) as draft:
            shutil.copytree(beside, draft, ignore=outside, dirs_exist_ok=True)
    shard_writer.print_settings(f"{folder}/*.tar", tokenizer, options.preset)
    return shard_writer.print_left_out(folder, records.values(), broken, options.max_left_out)


def members_of(tar: str, preparation: Preparation, broken: list[Named]) -> Iterator[Member]:
    """Yield the prepared items of a tar (path or URL), and add unusable ones to `broken`."""
    for item in list_items(tar, lambda name, reason: broken.append((name, reason))):
        try:
            fetch(item)
            clip = preparation.clip(choose_clip(item, "encoded"))
        except BrokenItemError as error:
            broken.append((f"{tar}: {item['__key__']}", str(error)))
            continue
        others = {
            name: item[name] for name in item.keys() - {*CLIP_FORMATS} if name[:1] not in ("", "_")
        }
        yield {"__key__": item["__key__"], clip.extension: clip.content, **others}, clip.seconds


def _by_name(tars: Iterable[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for tar in tars:
        name = tar.rpartition("/")[2].partition(".tar")[0] + ".tar"
        if named.setdefault(name, tar) != tar:
            raise UserError(
                f"{named[name]} and {tar} would both become {name}; prepare them into separate folders"
            )
    return named
