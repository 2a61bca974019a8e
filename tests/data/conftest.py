"""What the data tests share."""

from __future__ import annotations

import pytest

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.model.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small trained tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a loud tone", "a quiet tone", "a long low hum and a click"], directory)
    return str(directory)


@pytest.fixture
def micro() -> ClapConfig:
    """The micro preset with clips of 480 samples."""
    model = load_preset("micro")
    return model.model_copy(update={"audio": model.audio.model_copy(update={"num_samples": 480})})
