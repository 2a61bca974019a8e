"""Fixtures of inference tests: a checkpoint of the micro model, whose window is a second, and
sounds."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import clap_ds
from clap_ds.config.model import load_preset
from clap_ds.inference.model import Clap
from clap_ds.model.clap import ClapModel
from tests.weights.fake_checkpoints import checkpoint_of


@pytest.fixture(scope="session")
def clap_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> Path:
    """Return a run's checkpoints: step 1 is the best, step 2 the newest."""
    folder = tmp_path_factory.mktemp("trained") / "my_run-1a2b3c4d-checkpoints"
    for step in (1, 2):
        torch.manual_seed(step)
        checkpoint_of(
            ClapModel(load_preset("micro")),
            folder,
            step,
            Path(tokenizer_dir),
            settings={"clap": {"context_length": 12}},
            metrics={"zero_shot_top1": 1 / step},
            best_metric="zero_shot_top1",
        )
    return folder


@pytest.fixture
def clap(clap_folder: Path) -> Clap:
    return clap_ds.load(clap_folder)


def noise(seconds: float, rate: int = 48000, channels: int = 1) -> np.ndarray:
    """Return fixed noise, (channels, num_samples) float32."""
    shape = (channels, round(seconds * rate))
    return np.random.default_rng(0).uniform(-0.5, 0.5, shape).astype(np.float32)


def write_sound(path: Path, samples: np.ndarray, rate: int = 48000) -> str:
    subtype = {".ogg": "VORBIS", ".mp3": None}.get(path.suffix, "PCM_16")
    soundfile.write(path, samples.T, rate, subtype=subtype)
    return str(path)
