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


def test_thousand_clips(capsys: pytest.CaptureFixture[str]) -> None:
    """A WAV of 44 + 960,000 bytes takes 1,876 blocks; with two headers and a block of JSON, 962,048 bytes. 960 MB are two
    tars of 500 items. Each, with its padding, takes 46,976 records of 10,240 bytes; both total 962,068,480 bytes."""
    shards.main(
        ["size", "--clips", "1000", "--link", "0.01", "--files_per_s", "0.5", "--samples_per_s", "1000", "--gpus", "6"]
    )
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]]
    assert {label: cells[1] for label, *cells in rows} == {
        "per clip, in its tar": "962,068 B",
        "total": "0.962 GB",
        "tars of about 500 MB": "2",
        "copied at 0.01 Gbit/s in": "0.214 h",  # by bytes
        "copied as single files at 0.01 Gbit/s in": "0.556 h",  # by files
        "at 1,000 samples/s per GPU, total": "5.77 GB/s",
        "at 1,000 samples/s per GPU, per node": "3.85 GB/s",
    }


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
