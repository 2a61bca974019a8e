"""Fixtures of the data tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData, SyntheticData
from clap_ds.data import remote_files
from clap_ds.data.dataloader import BatchSource, build_batches

OpenSource = Callable[..., BatchSource]

SPEC_FIELDS = ("micro_batch", "rank", "world_size", "ranks_per_host", "seed", "device")


@pytest.fixture(autouse=True)
def shard_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder of remote shards, and retry without waiting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.0)
    return tmp_path / "clap_ds" / "shards"


@pytest.fixture
def open_source(tokenizer_dir: str, micro: ClapConfig) -> OpenSource:
    """Return a function that opens a rank's batches from shards, or synthetic ones, with settings
    of `clap.data` and fields of `BatchSpec`."""

    def open_data(
        shards: Any = None, states: Sequence[dict[str, Any]] = (), **settings: Any
    ) -> BatchSource:
        spec = {name: settings.pop(name) for name in SPEC_FIELDS if name in settings}
        spec = {"micro_batch": 4, "context_length": 12} | spec
        if shards is None:
            data: Any = SyntheticData(source="synthetic", **settings)
        else:
            defaults = {"tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0}
            data = ShardData(source="webdataset", shards=shards, **(defaults | settings))
        # as a checkpoint stores it
        states = json.loads(json.dumps(states))
        return build_batches(data, model=micro, states=states, **spec)

    return open_data
