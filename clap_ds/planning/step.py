"""Record a rank's training step with the run's engine on fake tensors: model, loss over all ranks, backward, AdamW.

It is the second step, when the optimizer has its state and torch's reducer its buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
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
from clap_ds.planning.inductor import fused_kernels, is_fusible
from clap_ds.planning.tracing import Operation, Recorded, trace
from clap_ds.run_records.timers import PhaseTimer

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECTIONS = ("bf16", "fp16", "torch_autocast", "gradient_clipping", "communication_data_type")
"""DeepSpeed's sections that affect a step's computation and memory."""
PARTS = {
    "data_wait": "batches", "forward": "gradients", "loss": "loss", "backward": "gradients", "optimizer": "optimizer",
}  # fmt: skip
"""Phase of the engine's step → part of its operations outside the towers and autograd."""


@dataclass(frozen=True)
class Step:
    """Hold a recorded step, its samples per rank, the repetitions of its recorded micro-batches, the forward and backward
    passes per step, and the number of trained parameters."""

    recorded: Recorded
    num_samples: int
    repeats: float
    passes: tuple[int, int]
    num_parameters: int

    def work(self, kernels: Iterable[Operation] = ()) -> list[tuple[Operation, float]]:
        """Return the operations except collectives with their repetitions per step. `kernels`: a pass's fused kernels, if
        towers are compiled."""
        fused = [(each, float(self.passes[each.backward])) for each in kernels]
        launched = [each for each in self.recorded.operations if each.launches and not each.is_collective]
        own = [each for each in launched if not (fused and is_fusible(each))]
        return [(each, 1 if each.part in ("gradients", "optimizer") else self.repeats) for each in own] + fused


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
    packed, layout = tree_map_only(Tensor, fakes.from_tensor, _packed(run, lengths))
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
    num_parameters = sum(each.numel() for each in trained)
    return Step(recorded, micro_batch * number, number / num_traced, (number * (1 + cached), number), num_parameters)


def compiled_kernels(run: RunSettings, micro_batch: int) -> list[Operation]:
    """Return Inductor's own kernels, on a GPU, of one forward and backward pass of the mel front end and both towers."""
    run, lengths = _without_side_effects(run, micro_batch), caption_lengths(run, micro_batch)
    with torch.device("meta"):
        model = build_model(run, torch.device("cuda")).to(DTYPES.get(run.precision, torch.float32)).train()
    model.to_empty(device="cpu")
    packed, _ = _packed(run, lengths)
    audio, *text = next(_batches(run, micro_batch, sum(lengths), packed, cuda=True)).model_inputs()
    inputs: dict[str, list[Any]] = {"audio": [audio], "text": text}
    if audio.ndim == 2:
        inputs |= {"mel": [audio], "audio": [torch.empty(micro_batch, *model.config.audio.feature_shape)]}
    kernels = []
    with torch.autocast("cpu", torch.bfloat16, enabled=run.precision.startswith("torch_autocast")):
        for name, tensors in inputs.items():
            part = "text" if name == "text" else "audio"
            for backward, num_bytes in fused_kernels(model.get_submodule(name), *tensors):
                kernels.append(Operation("fused", part, backward, 0, ((0, num_bytes),), (), True, None))
    return kernels


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


def _packed(run: RunSettings, lengths: list[int]) -> tuple[Any, Any]:
    """Return a batch's packed row with packing, and their layout, if the run packs captions."""
    if not run.clap.text_packing:
        return None, None
    mask = (torch.arange(run.clap.context_length) < torch.tensor(lengths)[:, None]).long()
    row, packing = pack([(torch.ones_like(mask), mask)])
    return (row, packing), lay_out(packing, len(row), run.clap.preset().text.first_position)


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
