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
    np.save(file, np.zeros((AUDIO.num_samples // AUDIO.hop_size + 1, AUDIO.mel_bins), np.float16))
    return file.getvalue()


CLIPS = {
    "`encoded`, 48 kHz stereo FLAC": bytes(10 * 48_000 * 2 * 2 * 55 // 100),  # 55% of its samples
    "`encoded`, MP3": bytes(10 * 128_000 // 8),
    "`waveform`": wav(np.zeros(AUDIO.num_samples), AUDIO.sample_rate, "PCM_16"),
    "`mel`": encode_features(),
}


@pytest.mark.parametrize("kind", CLIPS)
def test_stated_bytes_of_a_clip_are_those_it_takes_in_a_tar(kind: str) -> None:
    page = (PACKAGE.parent / "docs/data.md").read_text()
    stated = re.search(rf"^\| {re.escape(kind)}[^|]*\| ([\d,]+) \|", page, re.MULTILINE)
    assert stated is not None
    sizes = []
    for num_items in (100, 300):
        file = io.BytesIO()
        with TarWriter(file, encoder=False, mtime=0) as tar:
            for number in range(num_items):
                tar.write(
                    {
                        "__key__": f"{number:09d}",
                        "audio": CLIPS[kind],
                        "json": b'{"caption": "a tone"}',
                    }
                )
        sizes.append(len(file.getvalue()))
    padding_of_tars = 10_240
    assert int(stated[1].replace(",", "")) == pytest.approx(
        (sizes[1] - sizes[0]) / 200, abs=padding_of_tars / 200
    )
