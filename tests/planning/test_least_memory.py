"""Test that the bound is below the memory of autograd and the optimizer, and rejects runs by the
limits that ranks share."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.engine.deepspeed_compat import inner_optimizer
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model
from clap_ds.engine.loss import build_loss
from clap_ds.planning.least_memory import (
    LeastMemory,
    describe_shortage,
    least_activations,
    least_memory,
)
from clap_ds.run_records.environment import MemoryLimit
from tests.conftest import micro_run
from tests.processes import ROOT

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GB = 10**9
BATCH = 4


def write_settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "run.json"
    path.write_text(json.dumps(micro_run(**changes)))
    return load_run(path, 1)


def stored_bytes(run: RunSettings) -> tuple[int, int]:
    """Return the bytes that one step's forward pass stores for the backward pass, and those of
    weights and optimizer state."""
    model = build_model(run.clap.model, run.clap.loss, CPU, run.clap.train.freeze)
    loss = build_loss(run.clap.loss, run.precision)
    engine = ClapEngine(model, loss, run.deepspeed, run.clap, run.clap.train)
    ids = torch.full((BATCH, run.clap.context_length), 5)
    clips = torch.zeros(BATCH, *model.config.audio.clip_shape, dtype=torch.int16)
    batch = Batch(clips, ids, torch.ones_like(ids))
    if run.clap.packs_captions:
        batch.pack()
    engine.step(iter([batch]))
    tensors = [*model.parameters(), *engine.masters.values()]
    for state in inner_optimizer(engine.deepspeed.optimizer).state.values():
        tensors += [tensor for tensor in state.values() if tensor.dim()]
    if engine.ema is not None:
        tensors += engine.ema.weights.values()
    state_bytes = storage_bytes(tensors)
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        engine.deepspeed(*batch.model_inputs())
    activation_bytes = storage_bytes(saved)
    activations = sum(activation_bytes[key] for key in activation_bytes.keys() - state_bytes.keys())
    return activations, sum(state_bytes.values())


def storage_bytes(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of distinct storages by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"clap": {"train": {"freeze": ["audio"], "ema_decay": 0.9}}},
        {"clap": {"text_packing": True, "data": {"source": "synthetic", "caption_lengths": 7}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ],
)
def test_bound_is_slightly_below_a_steps_memory(one_rank, tmp_path, changes):
    run = write_settings(tmp_path, **changes)
    [(activations, state)] = one_rank.run(stored_bytes, run)
    assert 0.3 * activations < BATCH * least_activations(run, CPU) <= activations
    assert 0.95 * state < least_memory(run, CPU).state <= state


def test_checkpointed_or_compiled_towers_need_less(tmp_path):
    model = {**micro_run()["clap"]["model"], "activation_checkpointing": ["audio", "text"]}
    checkpointed = least_activations(write_settings(tmp_path, clap={"model": model}), CPU)
    compiled = least_activations(write_settings(tmp_path, clap={"compile": "towers"}), CPU)
    plain = write_settings(tmp_path)
    assert 0 < checkpointed < 0.6 * least_activations(plain, CPU)
    assert least_activations(plain, CUDA) == compiled < least_activations(plain, CPU)


@pytest.mark.parametrize(
    ("device", "available", "advice"),
    [
        (CPU, 24 * GB, "htsat_tiny_cpu"),
        (CPU, 200 * GB, ""),
        (CUDA, 16 * GB, "clap.bench.find_micro_batch"),
    ],
)
def test_gpu_benchmark_on_a_small_host_or_gpu_gets_advice(device, available, advice):
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1)
    limits = [[("tux", MemoryLimit("available memory", available))]]
    least = least_memory(run, device)
    message = describe_shortage(least, run.micro_batch, device.type, limits)
    assert advice in message
    assert bool(advice) == ("tux" in message)


def test_ranks_share_limits_of_hosts_but_not_of_processes():
    least = LeastMemory(state=4 * GB, gradients=GB, per_sample=GB // 4)
    host = MemoryLimit("available memory", 17 * GB)
    ranks = [
        [("n1", host), ("n1", MemoryLimit(f"ulimit -v of process {pid}", 9 * GB))] for pid in (5, 6)
    ]
    assert not describe_shortage(least, 16, "cpu", ranks)
    assert "n1 has 17.0 GB for 2 ranks" in describe_shortage(least, 20, "cpu", ranks)
    assert not describe_shortage(least, 20, "cpu", [[("n1", host)], [("n2", host)]])
    ranks[1][1] = ("n1", MemoryLimit("ulimit -v of process 6", 6 * GB))
    assert "6.0 GB for 1 rank: ulimit -v of process 6" in describe_shortage(least, 16, "cpu", ranks)


def test_largest_micro_batch_fills_the_memory():
    least = LeastMemory(state=4 * GB, gradients=2 * GB, per_sample=GB)
    assert [least.largest_micro_batch(available * GB) for available in (5, 6, 9)] == [0, 2, 5]
    assert least.total(5) == 9 * GB
    # All gradients exist at once.
    assert least.total(1) == 6 * GB
