"""The bound is below what autograd and the optimizer hold, and refuses runs by the limits that
ranks share."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
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
from tests.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GB = 10**9
BATCH = 4


def _settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "run.json"
    path.write_text(json.dumps(micro_run(**changes)))
    return load_run(path, 1)


def _kept_bytes(run: RunSettings) -> tuple[int, int]:
    """Return the bytes that one step's forward pass keeps for the backward pass, and those of
    weights and optimizer state."""
    model = build_model(run.clap.model, run.clap.loss, CPU, run.clap.train.freeze)
    engine = ClapEngine(
        model, build_loss(run.clap.loss, run.precision), run.deepspeed, run.clap, run.clap.train
    )
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    config = model.config
    ids = torch.full((BATCH, run.clap.context_length), 5)
    batch = Batch(
        torch.zeros(BATCH, *config.audio.clip_shape, dtype=torch.int16), ids, torch.ones_like(ids)
    )
    if run.clap.text_packing:
        batch.pack()
    engine.step(iter([batch]))
    optimizer: Any = engine.deepspeed.optimizer
    tensors = [*model.parameters(), *engine.masters.values()]
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        tensors += [each for each in state.values() if each.dim()]
    if engine.average is not None:
        tensors += engine.average.weights.values()
    state_bytes = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors
    }
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = engine.deepspeed(*batch.model_inputs())
    del features
    activations = sum(each.nbytes() for key, each in kept.items() if key not in state_bytes)
    return activations, sum(state_bytes.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clap": {"cpu_kernels": "off"}},
        {"bf16": {"enabled": False}},
        {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"clap": {"train": {"freeze": ["audio"], "ema_decay": 0.9}}},
        {"clap": {"train": {"freeze": ["text"]}}},
        {"clap": {"text_packing": True, "data": {"source": "synthetic", "caption_lengths": 7}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ],
)
def test_the_bound_is_below_what_a_step_keeps(
    one_rank: RankPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = _settings(tmp_path, **changes)
    [(activations, state)] = one_rank.run(_kept_bytes, run)
    least = least_memory(run, CPU)
    assert 0.3 * activations < BATCH * least_activations(run, CPU) <= activations
    assert 0.95 * state < least.state <= state


def test_checkpointed_towers_need_their_inputs_or_their_largest_block(tmp_path: Path) -> None:
    model = {**micro_run()["clap"]["model"], "activation_checkpointing": ["audio", "text"]}
    checkpointed = _settings(tmp_path, clap={"model": model})
    plain = _settings(tmp_path)
    assert 0 < least_activations(checkpointed, CPU) < 0.6 * least_activations(plain, CPU)
    compiled = _settings(tmp_path, clap={"compile": "towers"})
    assert (
        least_activations(plain, CUDA)
        == least_activations(compiled, CPU)
        < least_activations(plain, CPU)
    )


def _shortage(
    run: RunSettings, device: torch.device, *limits: list[tuple[str, MemoryLimit]]
) -> str:
    return describe_shortage(least_memory(run, device), run.micro_batch, device.type, [*limits])


@pytest.mark.parametrize(
    ("available", "is_refused"), [(8 * GB, True), (24 * GB, True), (200 * GB, False)]
)
def test_the_benchmark_of_a_gpu_needs_a_host_with_much_memory(
    available: int, is_refused: bool
) -> None:
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1)
    text = _shortage(run, CPU, [("tux", MemoryLimit("available memory", available))])
    assert ("htsat_tiny_cpu" in text and "at most" in text and "tux" in text) == is_refused
    assert "find_micro_batch" not in text
    small = load_run(ROOT / "ds_configs" / "htsat_tiny_cpu.json", 1)
    assert not _shortage(small, CPU, [("tux", MemoryLimit("available memory", available))])


def test_a_gpu_too_small_gets_advice_for_gpus() -> None:
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1)
    assert not _shortage(run, CUDA, [("tux", MemoryLimit("memory of an H100", 80 * GB))])
    text = _shortage(run, CUDA, [("tux", MemoryLimit("memory of a V100", 16 * GB))])
    assert "clap.bench.find_micro_batch" in text
    assert "htsat_tiny_cpu" not in text


def test_ranks_share_their_hosts_limits_and_have_their_own() -> None:
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


def test_a_fitting_micro_batch_is_named_unless_weights_alone_do_not_fit() -> None:
    least = LeastMemory(state=4 * GB, gradients=2 * GB, per_sample=GB)
    assert [least.largest_micro_batch(available * GB) for available in (5, 6, 9)] == [0, 2, 5]
    assert least.total(5) == 9 * GB
    assert least.total(1) == 6 * GB  # all gradients exist at once
