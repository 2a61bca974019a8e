"""Shared fixtures, and what keeps a test run the same on every machine."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes with a gloo group between them."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_processes() -> Iterator[RankPool]:
    """Eight processes to be joined in groups of any size up to that."""
    pool = RankPool(8, grouped=False)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_gpu() -> Iterator[RankPool]:
    """A process of its own on the first GPU."""
    pool = RankPool(1, gpu=True)
    yield pool
    pool.close()


def micro_run(**changes: Any) -> dict[str, Any]:
    """A run of the micro preset that takes seconds; `changes` replace top-level fields, `clap` is merged."""
    clap = {
        "model": {"preset": "micro", "drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False},
        "text_tokens": 16,
        "bench": {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "breakdown_steps": 1},
    }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2}},
        **changes,
        "clap": {**clap, **changes.get("clap", {})},
    }


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a micro run's JSON, whose runs go to the test's own folder, and return its path."""

    def write(**changes: Any) -> Path:
        run = micro_run(**changes)
        run["clap"].setdefault("output", {"root": str(tmp_path / "runs")})
        path = tmp_path / "run.json"
        path.write_text(json.dumps(run, indent=2))
        return path

    return write
