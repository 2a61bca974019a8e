"""`clap-shards prepare`: preprocess the audio of shards for a model, so that runs needn't decode it.

    clap-shards prepare 'shards/train-*.tar' mel --kind mel --preset htsat_tiny_roberta_base

Each output tar has the name, items and order of its input; only the audio changes. Unusable items are skipped, counted
and listed in `broken.jsonl`.
"""

from __future__ import annotations

import io
import math
import random
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from clap_ds.config.errors import UserError
from clap_ds.config.files import own_folder, read_bytes, replacing
from clap_ds.config.model import PRESETS, AudioConfig, load_preset
from clap_ds.cpu_kernels.patch_model import convert
from clap_ds.data import decoding
from clap_ds.data.build_shards import shard_writer
from clap_ds.data.build_shards.shard_writer import Member, Named
from clap_ds.data.clip import CLIP_FORMATS, FEATURES, captions_of, choose_clip
from clap_ds.data.decoding import AUDIO_FORMATS, BrokenItemError, check_peak, check_samples, decode_audio, open_audio
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FrontEnd, expand_shards, folder_of, read_manifest, tokenizer_beside
from clap_ds.data.tar_samples import fetch, list_items
from clap_ds.model.mel import LogMel


class EncodedClip(NamedTuple):
    extension: str
    content: bytes
    seconds: float


def as_it_is(content: bytes, extension: str) -> EncodedClip:
    """Keep a file, or convert it to FLAC if training doesn't support its format. Raises BrokenItemError."""
    with open_audio(content) as file:
        rate, expected = file.samplerate, file.frames
        samples = file.read(dtype="float32", always_2d=True)
    check_peak(samples)
    check_samples(len(samples), expected, not samples.any())
    if extension not in AUDIO_FORMATS:
        mixed = samples if samples.shape[1] <= 8 else samples.mean(axis=1)  # FLAC supports 8 channels
        extension, content = "flac", _encoded(mixed.clip(-1, 1), rate, "FLAC")
    return EncodedClip(extension, content, len(samples) / rate)


class Preparation:
    """Convert audio files to kind `waveform`, or `mel` after repeating short clips."""

    def __init__(self, kind: Kind, audio: AudioConfig) -> None:
        self.kind, self.audio, self.front_end = kind, audio, FrontEnd.of(audio)
        self._log_mel = LogMel(audio)
        convert(self._log_mel)

    def clip(self, content: bytes, extension: str = "") -> EncodedClip:
        """Convert an audio file. Raises BrokenItemError."""
        rate = self.audio.sample_rate
        with open_audio(content) as file:
            num_samples = math.ceil(file.frames * decoding.resampling_ratio(file.samplerate, rate))
            row = torch.from_numpy(np.empty(num_samples, np.int16))  # torch's error isn't a MemoryError
        waveform = row[: decode_audio(content, row, sample_rate=rate, rng=random.Random(0))].numpy()
        if not waveform.any():
            raise BrokenItemError("audio is silent: every sample is 0 in 16 bits")
        wav, seconds = _encoded(waveform, rate, "WAV"), len(waveform) / rate
        if self.kind == "waveform":
            return EncodedClip("wav", wav, seconds)
        np.save(file := io.BytesIO(), self._features(wav, len(waveform)))
        return EncodedClip(FEATURES, file.getvalue(), seconds)

    def _features(self, wav: bytes, num_samples: int) -> NDArray[np.float16]:
        """Compute the (frames, mel_bins) features of a WAV, as training would, but uncropped."""
        length, hop = self.audio.num_samples, self.audio.hop_size
        row = torch.empty(max(num_samples, length), dtype=torch.int16)
        decode_audio(wav, row, sample_rate=self.audio.sample_rate, rng=random.Random(0))
        whole = length + (len(row) - length) // hop * hop
        return self._log_mel.of_any_length(row[None, :whole])[0].half().numpy()


def _encoded(samples: NDArray[Any], rate: int, file_format: str) -> bytes:
    soundfile.write(file := io.BytesIO(), samples, rate, format=file_format, subtype="PCM_16")
    return file.getvalue()


def add_preparation_options(parser: ArgumentParser, kinds: tuple[Kind, ...], **more: Any) -> None:
    add = parser.add_argument_group("preprocessing for a model").add_argument
    what = "waveform: 16-bit mono WAV at the model's rate; mel: the model's float16 features; encoded: original files"
    add("--kind", choices=kinds, help=what, **more)
    add("--preset", metavar="NAME", help=f"model preset: {PRESETS}")


def preparation_of(options: Namespace) -> Preparation | None:
    """Build the `Preparation` of these options; None for kind `encoded`. Raises UserError if they conflict."""
    if (options.kind == "encoded") == bool(options.preset):
        raise UserError(f"--kind {options.kind}: waveform and mel require a --preset ({PRESETS}); encoded takes none")
    if options.kind == "mel" and load_preset(options.preset).audio.fusion:
        raise UserError(f"--kind mel: {options.preset} has feature fusion: expected --kind waveform")
    return Preparation(options.kind, load_preset(options.preset).audio) if options.preset else None


def add_prepare_options(parser: ArgumentParser) -> None:
    more = "tars: paths, patterns or URLs, as in clap.data.shards"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=more)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume")
    add_preparation_options(parser, ("waveform", "mel"), required=True)
    shard_writer.add_work(parser)


def run_prepare(options: Namespace) -> int:
    """Prepare shards and return the exit code."""
    preparation = preparation_of(options)
    assert preparation is not None  # `encoded` isn't among the choices
    tars, folder = _by_name(expand_shards(options.shards)), options.folder
    for place in dict.fromkeys(map(folder_of, tars.values())):
        if read_manifest(place).kind == "mel":
            raise UserError(f"{place} holds features; expected audio")
    members = {name: partial(members_of, tar, preparation) for name, tar in tars.items()}
    shards = shard_writer.fill(folder, tars.values(), members, options, (preparation.kind, preparation.front_end))
    shard_writer.print_amount("part {}/{}".format(*options.part) if options.part else preparation.kind, shards)
    if options.part:
        return 0
    tokenizer = Path(next(iter(tars.values()))).parent / "tokenizer"
    if tokenizer.is_dir():
        with own_folder(folder / tokenizer.name) as own:
            for file in filter(Path.is_file, tokenizer.iterdir()):
                with replacing(own / file.name) as copy:
                    copy.write(read_bytes(file))
    shard_writer.print_settings(f"{folder}/*.tar", tokenizer_beside(f"{folder}/*.tar"), options.preset)
    return shard_writer.print_left_out(folder, shards, [], options.max_left_out)


def members_of(tar: str, preparation: Preparation, broken: list[Named]) -> Iterator[Member]:
    """Yield the prepared items of a tar (path or URL), and add unusable ones to `broken`."""
    for item in list_items(tar, lambda name, reason: broken.append((name, reason))):
        try:
            fetch(item)
            captions_of(item)
            clip = preparation.clip(choose_clip(item, "encoded"))
        except BrokenItemError as error:
            broken.append((f"{tar}: {item['__key__']}", str(error)))
            continue
        others = {name: item[name] for name in item.keys() - {*CLIP_FORMATS} if name[:1] not in ("", "_")}
        yield {"__key__": item["__key__"], clip.extension: clip.content, **others}, clip.seconds


def _by_name(tars: Iterable[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for tar in tars:
        name = re.sub(r"\.(tar|tgz)\b.*", "", tar.rpartition("/")[2]) + ".tar"
        if named.setdefault(name, tar) != tar:
            raise UserError(f"{named[name]} and {tar} would both become {name}; prepare them into separate folders")
    return named
