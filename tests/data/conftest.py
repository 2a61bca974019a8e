"""What the data tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData, SyntheticData
from clap_ds.data.sources import BatchSource, build_batches

OpenSource = Callable[..., BatchSource]


@pytest.fixture
def open_source(tokenizer_dir: str, micro: ClapConfig) -> OpenSource:
    """Opens the batches of a rank: of the shards named, or synthetic ones. More settings are those of `clap.data`."""

    def open_data(
        shards: str | list[str] | dict[str, float] | None = None,
        state: dict[str, Any] | None = None,
        *,
        micro_batch: int = 4,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> BatchSource:
        if shards is None:
            data: Any = SyntheticData.model_validate({"source": "synthetic", **settings})
        else:
            settings = {"tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0, **settings}
            data = ShardData(source="shards", shards=shards, **settings)
        return build_batches(
            data,
            model=micro,
            text_tokens=12,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            seed=seed,
            device=torch.device("cpu"),
            state=None if state is None else json.loads(json.dumps(state)),
        )

    return open_data
