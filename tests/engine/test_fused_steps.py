"""Training a model with feature fusion by the engine, on shards of clips and of longer files."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from clap_ds.config import settings as config_settings
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.data.sources import build_batches
from clap_ds.engine.building import build_model
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.patch_embed import longer_rows
from clap_ds.record.clock import PhaseTimer
from tests.data.tars import wav, write_tar
from tests.engine.test_engine import settings
from tests.rank_pool import RankPool

CPU = torch.device("cpu")


def fused_preset(_: str) -> ClapConfig:
    micro = load_preset("micro")
    return micro.model_copy(update={"audio": micro.audio.model_copy(update={"fusion": True})})


def steps(precision: str, accumulation: str, data: dict[str, Any]) -> tuple[list[float], list[bool], dict[str, float]]:
    """Losses, which rows were longer, and by how much each weight and statistic of fusion moved."""
    clap = {"data": data, "train": {"accumulation": accumulation}}
    with mock.patch.object(config_settings, "load_preset", fused_preset):
        run = settings(precision, 2, clap=clap, optimizer={"type": "AdamW", "params": {"lr": 2e-3}})
        torch.manual_seed(0)
        engine = ClapEngine(run, build_model(run, CPU), CPU)
        kept = {name: tensor.clone() for name, tensor in engine.model.audio.patch_embed.state_dict().items()}
        sizes: dict[str, Any] = {"text_tokens": 16, "micro_batch": run.micro_batch, "seed": 0, "device": CPU}
        with build_batches(run.clap.data, model=run.clap.preset(), rank=0, world_size=1, **sizes) as batches:
            is_longer = longer_rows(batches.peek().audio).tolist()
            losses = [float(engine.step(batches, PhaseTimer(CPU, instrumented=False))) for _ in range(30)]
    state = engine.model.audio.patch_embed.state_dict()
    return losses, is_longer, {name: float((state[name] - value).abs().max()) for name, value in kept.items()}


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", "independent"), ("bf16", "cached")])
def test_steps_on_short_and_longer_files_teach_every_part_of_fusion(
    one_rank: RankPool, tmp_path: Path, tokenizer_dir: str, precision: str, accumulation: str
) -> None:
    time, members = np.arange(100_000) / 48000, []
    for n in range(6):
        sound = 0.5 * np.sin(2 * np.pi * (300 + 900 * n) * time[: 30_000 if n % 2 else None]).astype(np.float32)
        members += [(f"{n}.wav", wav(sound)), (f"{n}.txt", f"tone {n}".encode())]
    tar = str(write_tar(tmp_path / "a.tar", members))
    data = {"source": "shards", "shards": tar, "tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0}
    (losses, is_longer, moved), *_ = one_rank.run(steps, precision, accumulation, data)
    assert is_longer == [True, False, True]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), losses
    bias_before_norm = ("_att.0.bias", "_att.1.bias", "_att.3.bias", "_att.4.bias")  # some, which learn nothing
    assert [name for name, by in moved.items() if not by and not name.endswith(bias_before_norm)] == []
