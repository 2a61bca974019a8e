"""Figures of docs/data.md against tars of such clips, and of the pages on transfers against their formulas."""

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


UNITS = {
    "": 1,
    "million": 1e6,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "Mbit/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
    "h": 3600,
}
# Stated with three digits or fewer.
ROUNDING = 0.005
# Of each way: bytes/s, files/s, number of disks, and passes over a disk.
WAYS = {
    "WiFi": (37.5e6, 1_000, 1, 1),
    "1 Gbit/s": (125e6, 1_000, 1, 1),
    "10 Gbit/s": (1.25e9, 1_000, 1, 1),
    "a hard disk": (160e6, 100, 1, 2),
    "four hard disks": (160e6, 100, 4, 2),
    "a SATA SSD": (500e6, 10_000, 1, 2),
    "an NVMe SSD": (3e9, 100_000, 1, 2),
}


def read_numbers(page: str, row_start: str) -> list[float]:
    """Return the values, in units of `UNITS`, of the only table row that starts so."""
    text = (PACKAGE.parent / "docs" / page).read_text()
    (row,) = re.findall(rf"^\| {re.escape(row_start)}\b.*", text, re.MULTILINE)
    cells = re.findall(r"(?<=\| )([\d,.]+) ?([\w/]*)(?= \|)", row)
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in cells]


@pytest.mark.parametrize(
    "row",
    ["100 Mbit/s", "10 Gbit/s", "WiFi", "hard disk", "SATA SSD", "NVMe SSD", "1,000", "10,000"],
)
def test_docs_state_bytes_and_files_by_time(row):
    *_, per_s, per_hour, per_day = read_numbers("getting_data.md", row)
    assert [per_hour, per_day] == pytest.approx([per_s * 3600, per_s * 86_400], rel=ROUNDING)


@pytest.mark.parametrize("way", WAYS)
def test_docs_state_hours_of_a_transfer(way):
    bytes_per_s, files_per_s, disks, passes = WAYS[way]
    seconds = [
        passes / disks * max(20e12 / bytes_per_s, num_files / files_per_s)
        for num_files in (20e6, 40e3)
    ]
    assert read_numbers("transfers.md", way)[-2:] == pytest.approx(seconds, rel=ROUNDING)
