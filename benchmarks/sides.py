"""Implementations of CLAP's training step that hold the same weights and take the same batch: this project's, with DeepSpeed
and without, `transformers.ClapModel`'s, and that model in the training loops of open_clip and LAION-CLAP. `benchmarks.peers`
times them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import SyntheticData
from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.batch import Batch
from clap_ds.data.sources import build_batches
from clap_ds.flop_count.published_model import ConvolutionMel
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import LogMel
from clap_ds.model.window_attention import default_kernel
from clap_ds.native.convert import convert
from clap_ds.record.clock import PhaseTimer, seconds
from clap_ds.weights.formats import to_transformers
from clap_ds.weights.hf_config import config_to_transformers

import transformers  # isort: skip  (after torchaudio_compat)


def make_batch(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> Batch:
    """Noise and random captions on the device, as the options of `benchmarks.peers` ask."""
    low, high = arguments.caption_lengths or (arguments.text_tokens, arguments.text_tokens)
    lengths = {str(length): 1.0 for length in range(low, high + 1)}
    data = SyntheticData(source="synthetic", placement="device", caption_lengths=lengths, num_batches=1)
    of_run: Any = {"model": config, "device": device, "pack_captions": arguments.text == "packed"}
    of_run |= {"text_tokens": arguments.text_tokens, "micro_batch": arguments.micro_batch}
    with build_batches(data, **of_run, rank=0, world_size=1, seed=0) as batches:
        return next(batches)


class EngineSide:
    """One rank's step through `ClapEngine`, as `clap_ds/bench.py` makes it, in bf16. Ranks have been initialised."""

    def __init__(self, arguments: argparse.Namespace, batch: Batch) -> None:
        from clap_ds.engine.building import build_model
        from clap_ds.engine.engine import ClapEngine

        model = {"preset": arguments.preset, "drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False}
        settings: dict[str, Any] = {"text_tokens": arguments.text_tokens, "text": arguments.text, "model": model}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": arguments.micro_batch, "gradient_clipping": 0.0, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}}, "log_level": "error",
        }  # fmt: skip
        run = RunSettings(Path("peers"), ClapSettings.model_validate(settings), config)
        torch.manual_seed(0)
        self.engine = ClapEngine(run, build_model(run, batch.device), batch.device)
        self.losses: list[float] = []

    def step(self, batch: Batch) -> dict[str, float]:
        """As `Side.step`; the loss is in `forward`, all else of the engine's in `step` alone."""
        timer, device = PhaseTimer(batch.device, instrumented=True), batch.device
        whole_s = seconds(lambda: self.losses.append(float(self.engine.step(iter([batch]), timer))), device)
        parts = timer.seconds
        forward_s = parts["forward"] + parts["loss"]
        return {"front_end": 0.0, **parts, "forward": forward_s, "step": whole_s}


class MasterAdamW:
    """torch's fused AdamW; 16-bit parameters get fp32 masters, which it steps and copies back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.low = [parameter for parameter in parameters if parameter.dtype != torch.float32]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.low]
        fp32 = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        self.adam = torch.optim.AdamW([*fp32, *self.masters], lr=1e-6, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, low in zip(self.masters, self.low, strict=True):
            master.grad = torch.empty_like(master) if master.grad is None else master.grad
            master.grad.copy_(torch.zeros_like(low) if low.grad is None else low.grad)
        self.adam.step()
        for master, low in zip(self.masters, self.low, strict=True):
            low.copy_(master)
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Side:
    """One implementation, ready to step: how bf16 is used (`autocast`, `cast` with fp32 masters, or `none` of it), what a batch
    is prepared to for `loss` (timed as the front end), and an optimizer whose `step()` also drops the gradients."""

    model: nn.Module
    low: str
    prepare: Callable[[Batch], tuple[Any, ...]]
    loss: Callable[..., Tensor]
    losses: list[float] = field(default_factory=list)
    optimizer: Any = None

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.train().parameters() if parameter.requires_grad]
        self.optimizer = self.optimizer or MasterAdamW(trained)

    def step(self, batch: Batch) -> dict[str, float]:
        """One training step: seconds of each of its parts and of the whole, the device synchronised between them."""
        timer = PhaseTimer(batch.device, instrumented=True)
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.low == "autocast"):
            with timer("front_end"):
                inputs = self.prepare(batch)
            with timer("forward"):
                loss = self.loss(*inputs)
        with timer("backward"):
            loss.backward()
        with timer("optimizer"):
            self.optimizer.step()
        self.losses.append(float(loss.detach()))
        return {**timer.seconds, "step": sum(timer.seconds.values())}


def softmax_loss(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * audio.float() @ text.float().T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def our_model(config: ClapConfig, device: torch.device, low: str) -> ClapModel:
    """This project's model with fresh weights, always the same."""
    torch.manual_seed(0)
    model = ClapModel(config, drop_path=0.0, text_dropout=0.0, spec_augment=False, attention=default_kernel(device))
    if device.type == "cpu":
        convert(model)
    return model.to(device, torch.bfloat16 if low == "cast" else None)


def our_side(model: ClapModel, low: str) -> Side:
    """This project's model, with its CPU kernels where they can be used, without DeepSpeed."""
    return Side(model, low, Batch.model_inputs, lambda *inputs: softmax_loss(*model(*inputs)))


class LoopAdamW(torch.optim.AdamW):
    """As open_clip and LAION-CLAP make theirs: torch's default kernel, no decay of biases and norms."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": [p for p in parameters if (p.ndim < 2) == small]} for small in (False, True)]
        super().__init__([{**groups[0], "weight_decay": 0.2}, {**groups[1], "weight_decay": 0.0}], lr=1e-6)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.zero_grad()


def peer_side(
    ours: ClapModel, device: torch.device, low: str, loop: Literal["open_clip", "LAION"] | None = None
) -> Side:
    """`transformers.ClapModel` with the weights of ours at its best, or as in the training `loop` of open_clip or LAION-CLAP:
    torch's AdamW as it comes, and LAION's front end. (LAION's loop is fp16, which CPUs are slow at; here it is bf16.)

    Its window attention has only the eager form; its text attention goes through SDPA on CUDA and is eager on CPU, where
    SDPA's bf16 backward is several times slower.
    """
    hf_config: Any = config_to_transformers(ours.config)
    hf_config.audio_config.drop_path_rate = 0.0
    for tower in (hf_config.audio_config, hf_config.text_config):
        tower.hidden_dropout_prob = tower.attention_probs_dropout_prob = 0.0
    model: Any = transformers.ClapModel(hf_config)
    model.load_state_dict(to_transformers(ours.state_dict()), strict=False)
    if device.type == "cuda":
        # ClapTextModel doesn't declare that it can, but its attention goes through the same interface as RoBERTa's.
        model.text_model.config._attn_implementation = "sdpa"
    model.to(device, torch.bfloat16 if low == "cast" else None)
    mel = (ConvolutionMel if loop == "LAION" else LogMel)(ours.config.audio).to(device)
    if device.type == "cpu" and loop is None:
        convert(mel)

    def prepare(batch: Batch) -> tuple[Any, ...]:
        mask = batch.attention_mask if batch.num_tokens < batch.input_ids.numel() else None
        return mel(batch.audio)[:, None].to(model.dtype), batch.input_ids, mask

    def loss(features: Tensor, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        output = model(input_features=features, input_ids=input_ids, attention_mask=mask)
        return softmax_loss(output.audio_embeds, output.text_embeds, model.logit_scale_a.float().exp())

    return Side(model, low, prepare, loss, optimizer=LoopAdamW(model) if loop else None)
