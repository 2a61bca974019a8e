"""Test the bytes of a clip that docs/data.md states against tars of such clips."""

import io
import re

import numpy as np
import pytest
from webdataset.writer import TarWriter

from clap_ds.config.model import load_preset
from clap_ds.utils.paths import PACKAGE
from tests.data.tars import wav

AUDIO = load_preset("htsat_tiny_roberta_base").audio


def encode_features() -> bytes:
    file = io.BytesIO()
    num_frames = AUDIO.num_samples // AUDIO.hop_size + 1
    np.save(file, np.zeros((num_frames, AUDIO.mel_bins), np.float16))
    return file.getvalue()


CLIPS = {
    # 10 s of 16-bit stereo, of which FLAC takes 55%
    "`encoded`, 48 kHz stereo FLAC": bytes(10 * 48_000 * 2 * 2 * 55 // 100),
    # 128 kbit/s
    "`encoded`, MP3": bytes(10 * 128_000 // 8),
    "`waveform`": wav(np.zeros(AUDIO.num_samples), AUDIO.sample_rate, "PCM_16"),
    "`mel`": encode_features(),
}


def measure_tar(audio: bytes, num_items: int) -> int:
    file = io.BytesIO()
    item = {"audio": audio, "json": b'{"caption": "a tone"}'}
    with TarWriter(file, encoder=False, mtime=0) as tar:
        for number in range(num_items):
            tar.write({"__key__": f"{number:09d}", **item})
    return len(file.getvalue())


@pytest.mark.parametrize("kind", CLIPS)
def test_docs_state_bytes_of_a_clip_in_a_tar(kind):
    page = (PACKAGE.parent / "docs/data.md").read_text()
    stated = re.search(rf"^\| {re.escape(kind)}[^|]*\| ([\d,]+) \|", page, re.MULTILINE)
    assert stated is not None
    bytes_per_clip = (measure_tar(CLIPS[kind], 300) - measure_tar(CLIPS[kind], 100)) / 200
    # Tars are padded to blocks of 10,240 bytes.
    assert int(stated[1].replace(",", "")) == pytest.approx(bytes_per_clip, abs=10_240 / 200)
