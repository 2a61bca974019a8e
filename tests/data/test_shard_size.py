"""Test estimated shard sizes against figures computed by hand and real shards."""

import io
import re
import tarfile

import numpy as np
import pytest
from webdataset.writer import TarWriter

from clap_ds import shards
from clap_ds.config.model import load_preset
from clap_ds.data.shard_size import clip_bytes, item_bytes
from tests.data.tars import wav

TINY = load_preset("htsat_tiny_roberta_base").audio


def report(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, list[str]]:
    """Return the table's cells by row label."""
    shards.main(["size", *words.split()])
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()]
    return {label: cells for label, *cells in rows}


def test_thousand_clips(capsys: pytest.CaptureFixture[str]) -> None:
    """A WAV of 44 + 960,000 bytes takes 1,876 blocks; with two headers and a block of JSON, 962,048 bytes. 960 MB are two
    tars of 500 items. Each, with its padding, takes 46,976 records of 10,240 bytes; both total 962,068,480 bytes."""
    words = "--clips 1000 --link 10 --disk_mb_per_s 50 --rate 1000 --gpus 6"
    assert {label: cells[1] for label, cells in report(capsys, words).items()} == {
        "1,000 clips of 10 s": "waveform",
        "per clip, in its tar": "962,068 B",
        "total": "962 MB",
        "tars of about 500 MB": "2",
        "copied at 10 Gbit/s in": "0.77 s",
        "copied as single files at 10 Gbit/s in": "1 s",
        "written at 50 MB/s in": "19.2 s",
        "at 1,000 samples/s per GPU, total": "5.77 GB/s",
        "at 1,000 samples/s per GPU, per node": "3.85 GB/s",
    }
    found = report(capsys, "--clips 1000000 --gpus 16 --rate 3300 --format mp3 --disk_mb_per_s 1")
    assert found["tars of about 500 MB"] == ["320", "1,920", "257"]
    assert found["written at 1 MB/s in"] == ["44.9 h", "11.1 days", "36.1 h"]
    assert found["at 3,300 samples/s per GPU, per node"] == ["2.14 GB/s", "12.7 GB/s", "1.72 GB/s"]


def test_tars_and_files_are_as_large_as_said() -> None:
    for clip, items in ((44, 1), (512, 7), (513, 2), (960_044, 7)):
        file = io.BytesIO()
        with TarWriter(file, encoder=False, mtime=0) as tar:
            for number in range(items):
                tar.write({"__key__": f"{number:09d}", "wav": bytes(clip), "json": b'{"caption": "a tone"}'})
        assert 0 < len(file.getvalue()) - items * item_bytes(clip) <= tarfile.RECORDSIZE + 1024
    np.save(features := io.BytesIO(), np.zeros((1501, 64), np.float16))
    assert clip_bytes("mel", TINY, 15) == len(features.getvalue())
    assert clip_bytes("waveform", TINY, 0.5) == len(wav(np.zeros(24_000), 48_000, "PCM_16"))
