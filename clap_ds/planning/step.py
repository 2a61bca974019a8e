"""Record a rank's training step with the run's engine on fake tensors: model, loss over all ranks, backward, AdamW.

It is the second step, when the optimizer has its state and torch's reducer its buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from clap_ds.config.batch_sizes import ACCUMULATION, MICRO_BATCH
from clap_ds.config.errors import UserError
from clap_ds.config.schema import SyntheticData
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch, join
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model
from clap_ds.engine.optimizer import OPTIONS
from clap_ds.model import text
from clap_ds.model.packed import lay_out, pack
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.fake_ranks import faked_by, rank_of
from clap_ds.planning.roofline import fused
from clap_ds.planning.tracing import Operation, Recorded, trace
from clap_ds.run_records.timers import PhaseTimer

CPU = torch.device("cpu")
SECTIONS = ("bf16", "fp16", "torch_autocast", "gradient_clipping", "communication_data_type")
"""DeepSpeed's sections that affect a step's computation and memory."""
PARTS = {
    "data_wait": "batches", "forward": "gradients", "loss": "loss", "backward": "gradients", "optimizer": "optimizer",
}  # fmt: skip
"""Phase of the engine's step → part of its operations outside the towers and autograd."""


@dataclass(frozen=True)
class Step:
    """Hold a recorded step, its samples per rank, the repetitions of its recorded micro-batches, and the number of trained
    parameters."""

    recorded: Recorded
    num_samples: int
    repeats: float
    num_parameters: int

    def work(self, *, compiled: bool) -> list[tuple[Operation, float]]:
        """Return the operations except collectives with their repetitions per step, fused if `compiled`."""
        own = [each for each in self.recorded.operations if not each.is_collective]
        operations = fused(own) if compiled else own
        return [(each, 1 if each.part in ("gradients", "optimizer") else self.repeats) for each in operations]


def caption_lengths(run: RunSettings, num_captions: int) -> list[int]:
    """Return the real tokens of a batch's captions: by the run's histogram for synthetic data; else the maximum."""
    setting = getattr(run.clap.data, "caption_lengths", None) or run.clap.context_length
    histogram = setting if isinstance(setting, dict) else {setting: 1}
    lengths, weights = zip(*sorted((int(length), weight) for length, weight in histogram.items()), strict=True)
    places = (np.arange(num_captions) + 0.5) / num_captions
    return [lengths[each] for each in np.searchsorted(np.cumsum(weights) / sum(weights), places)]


def trace_step(run: RunSettings, micro_batch: int, world_size: int = 1, *, cuda: bool = True) -> Step:
    """Record a step of a run with this micro-batch on one of `world_size` ranks, with CUDA's or the CPU's torch operations.
    Raises UserError for an optimizer other than AdamW."""
    run = _without_side_effects(run, micro_batch)
    number, cached = run.gradient_accumulation_steps, run.clap.train.accumulation == "gradcache"
    num_traced = number if cached else min(number, 2)  # later ones are like the second
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(run, torch.device("cuda" if cuda else "cpu"))
    with fakes:
        model.to_empty(device="cpu")
    parts = {"audio": [model.mel, model.audio, model.audio_projection], "text": [model.text, model.text_projection]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lengths = caption_lengths(run, micro_batch)
    packed, layout = _packed(run, lengths, fakes)
    with (
        rank_of(world_size),
        mock.patch.object(text, "lay_out", return_value=layout),  # the engine's layout depends on values
        faked_by(fakes),
    ):
        engine = ClapEngine(run, model, CPU)
        batches = _batches(run, micro_batch, sum(lengths), packed, cuda=cuda)
        with trace(parts) as recorded, like_cuda() if cuda else nullcontext():
            timer = cast("PhaseTimer", lambda phase: recorded.part(PARTS[phase]))
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(lambda each: recorded.hold([each.grad], "gradients"))
            engine.set_accumulation_steps(1)
            with engine.sync.off():  # after a synchronized step, torch's reducer reorders its buckets by values
                engine.step(batches, timer)
            recorded.hold([*model.parameters(), *model.buffers()], "weights")
            average = engine.average.tensors if engine.average is not None else []
            recorded.hold([*_state(engine.deepspeed.optimizer), *average], "optimizer state")
            recorded.restart()
            engine.set_accumulation_steps(num_traced)
            engine.step(batches, timer)
    return Step(recorded, micro_batch * number, number / num_traced, sum(each.numel() for each in trained))


def _without_side_effects(run: RunSettings, micro_batch: int) -> RunSettings:
    """Return the run for the engine: with torch's operations and AdamW, and without DeepSpeed's monitors."""
    optimizer = run.deepspeed.get("optimizer", {"type": ""})
    if optimizer["type"].lower() not in ("adam", "adamw"):
        raise UserError(f"{run.path}: optimizer.type: plans support only AdamW, found {optimizer['type']!r}")
    model = run.clap.model.model_copy(update={"pretrained_text": False})
    clap = run.clap.model_copy(update={"model": model, "cpu_kernels": "off", "optimizer_implementation": "torch"})
    params = optimizer.get("params", {})
    config = {
        **{name: run.deepspeed[name] for name in SECTIONS if name in run.deepspeed},
        "optimizer": {"type": "AdamW", "params": {name: params[name] for name in OPTIONS if name in params}},
        MICRO_BATCH: micro_batch, ACCUMULATION: run.gradient_accumulation_steps, "log_level": "error",
    }  # fmt: skip
    return RunSettings(run.path, clap, config)


def _state(optimizer: Any) -> Iterator[Tensor]:
    """Yield master weights and moments."""
    yield from getattr(optimizer, "fp32_groups_flat", [])
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        yield from state.values()


def _packed(run: RunSettings, lengths: list[int], fakes: FakeTensorMode) -> tuple[Any, Any]:
    """Return a batch's packed row with packing, and their layout, if the run packs captions."""
    if not run.clap.text_packing:
        return None, None
    mask = (torch.arange(run.clap.context_length) < torch.tensor(lengths)[:, None]).long()
    row, packing = pack([(torch.ones_like(mask), mask)])
    layout = lay_out(packing, len(row), run.clap.preset().text.first_position)
    return tree_map_only(Tensor, fakes.from_tensor, ((row, packing), layout))


def _batches(run: RunSettings, micro_batch: int, num_tokens: int, packed: Any, *, cuda: bool) -> Iterator[Batch]:
    """Yield batches like `BatchSource`. On a GPU the next one is in memory too, with its 16-bit copy from the host."""
    data, audio = run.clap.data, run.clap.preset().audio
    narrow = torch.float16 if audio.fusion else torch.int16

    def make(dtype: torch.dtype = torch.float32) -> Batch:
        ids, mask = (torch.empty(micro_batch, run.clap.context_length, dtype=torch.long) for _ in range(2))
        return Batch(torch.empty(micro_batch, *audio.clip_shape, dtype=dtype), ids, mask, num_tokens, packed)

    if isinstance(data, SyntheticData) and (data.placement == "device" or not cuda):
        kept = [make(narrow) for _ in range(data.num_batches)]
        yield from (each if cuda and narrow == torch.int16 else join([each], CPU) for each in itertools.cycle(kept))
    is_narrow = getattr(data, "audio_dtype", "int16") == "int16"
    dtype = torch.int16 if is_narrow and not audio.fusion else torch.float32  # the front end converts waveforms
    _from_host = torch.empty(micro_batch * (is_narrow and audio.fusion), *audio.clip_shape, dtype=narrow)
    ahead = make(dtype)
    while True:
        batch, ahead = ahead, make(dtype)
        yield batch
        del batch
