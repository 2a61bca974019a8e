"""Implementations of CLAP's training step that hold the same weights and take the same batch: this project's, with DeepSpeed
and without, `transformers.ClapModel`'s, and that model in the training loops of open_clip and LAION-CLAP. `benchmarks.peers`
times them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.config.model_names import preset_names
from clap_ds.config.sections import SyntheticData
from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.batch import Batch
from clap_ds.data.sources import build_batches
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import MIN_POWER, LogMel
from clap_ds.model.window_attention import default_kernel
from clap_ds.native.adamw import native_adamw
from clap_ds.native.convert import convert
from clap_ds.native.library import unavailable
from clap_ds.record.clock import PhaseTimer, seconds
from clap_ds.weights.formats import to_transformers
from clap_ds.weights.hf_config import config_to_transformers

import transformers  # isort: skip  (after torchaudio_compat)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which step is timed."""
    parser.add_argument("--preset", default="htsat_tiny_roberta_base", choices=preset_names())
    parser.add_argument("--text_tokens", type=int, default=77)
    lengths = "LOW and HIGH, uniform; default: all of --text_tokens"
    parser.add_argument("--caption_lengths", type=int, nargs=2, metavar="N", help=lengths)
    parser.add_argument("--text", choices=("padded", "packed"), default="padded", help="our text tower's way")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)


def make_batch(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> Batch:
    """Noise and random captions on the device, as `add_step_options` asks."""
    low, high = arguments.caption_lengths or (arguments.text_tokens, arguments.text_tokens)
    lengths = {str(length): 1.0 for length in range(low, high + 1)}
    data = SyntheticData(source="synthetic", placement="device", caption_lengths=lengths, num_batches=1)
    of_run: Any = {"model": config, "device": device, "pack_captions": arguments.text == "packed"}
    of_run |= {"text_tokens": arguments.text_tokens, "micro_batch": arguments.micro_batch}
    with build_batches(data, **of_run, rank=0, world_size=1, seed=0) as batches:
        return next(batches)


class EngineSide:
    """One rank's step through `ClapEngine`, as `clap_ds/bench.py` makes it, in bf16. Ranks have been initialised."""

    def __init__(self, arguments: argparse.Namespace, batch: Batch, *, noise: float) -> None:
        from clap_ds.engine.building import build_model
        from clap_ds.engine.engine import ClapEngine

        model = {"preset": arguments.preset, "drop_path": noise, "text_dropout": noise, "spec_augment": noise > 0}
        settings: dict[str, Any] = {"text_tokens": arguments.text_tokens, "text": arguments.text, "model": model}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": arguments.micro_batch, "gradient_clipping": 0.0}
        config |= {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
            "log_level": "error",
        }
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
    """AdamW, torch's fused one; 16-bit parameters get fp32 masters, which it steps and copies back. `natively`, this project's
    CPU kernel steps those, without copies of gradients and masters."""

    def __init__(self, parameters: list[nn.Parameter], *, natively: bool = False) -> None:
        self.parameters, self.steps = parameters, 0
        self.low = [parameter for parameter in parameters if parameter.dtype != torch.float32]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.low]
        fp32 = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        self.adam = torch.optim.AdamW([*fp32, *self.masters], lr=1e-6, fused=True)
        self.moments = [[torch.zeros_like(master) for master in self.masters] for _ in range(2)] if natively else []

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        gradients = [torch.zeros_like(low) if low.grad is None else low.grad.contiguous() for low in self.low]
        if self.moments:
            options = {name: self.adam.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
            native_adamw(self.low, gradients, self.masters, *self.moments, step=self.steps, **options)
            self.adam.step()  # of the fp32 parameters: the masters have no gradients
        else:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
                master.grad.copy_(gradient)
            self.adam.step()
            for master, low in zip(self.masters, self.low, strict=True):
                low.copy_(master)
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Side:
    """One implementation, ready to step.

    Attributes:
        low: how bf16 is used: `autocast`, `cast` (weights in bf16, fp32 masters) or `none` of it.
        prepare: batch → what `loss` takes; timed as the front end.
        natively: as of `MasterAdamW`.
        losses: of the steps taken.
        optimizer: has `step()`, which also drops the gradients; `MasterAdamW` unless given.
    """

    model: nn.Module
    low: str
    prepare: Callable[[Batch], tuple[Any, ...]]
    loss: Callable[..., Tensor]
    natively: bool = False
    losses: list[float] = field(default_factory=list)
    optimizer: Any = None

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.train().parameters() if parameter.requires_grad]
        self.optimizer = self.optimizer or MasterAdamW(trained, natively=self.natively)

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


def our_model(config: ClapConfig, device: torch.device, *, low: str, noise: float = 0.0) -> ClapModel:
    """This project's model with fresh weights, always the same; `noise` is the rate of dropout and drop path."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"drop_path": noise, "text_dropout": noise, "spec_augment": noise > 0}
    model = ClapModel(config, **options, attention=default_kernel(device))
    if device.type == "cpu":
        convert(model)
    return model.to(device, torch.bfloat16 if low == "cast" else None)


def our_side(model: ClapModel, low: str) -> Side:
    """This project's model at its best: with its CPU kernels where they can be used."""
    natively = low == "cast" and model.logit_scale.is_cpu and not unavailable()
    return Side(model, low, Batch.model_inputs, lambda *inputs: softmax_loss(*model(*inputs)), natively)


class LoopAdamW(torch.optim.AdamW):
    """As open_clip and LAION-CLAP make theirs: torch's default kernel, no decay of biases and norms."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": [p for p in parameters if (p.ndim < 2) == small]} for small in (False, True)]
        super().__init__([{**groups[0], "weight_decay": 0.2}, {**groups[1], "weight_decay": 0.0}], lr=1e-6)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.zero_grad()


class ConvolutionMel(LogMel):
    """The same features as torchlibrosa has them for LAION-CLAP: its Fourier transform is a convolution."""

    waves: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config)
        numbers = torch.arange(self.num_fft, dtype=torch.float64)
        angles_KN = torch.outer(numbers[: self.num_fft // 2 + 1], numbers) * (2 * math.pi / self.num_fft)
        waves_KN = torch.cat([angles_KN.cos(), -angles_KN.sin()]).float() * self.window
        self.register_buffer("waves", waves_KN[:, None], persistent=False)

    def forward(self, waveforms: Tensor) -> Tensor:
        padded = F.pad(waveforms[:, None], (self.num_fft // 2,) * 2, mode="reflect")
        with torch.autocast(waveforms.device.type, enabled=False):
            real_BKT, imaginary_BKT = F.conv1d(padded, self.waves, stride=self.hop_size).chunk(2, dim=1)
            return 10.0 * self.mel_power(torch.complex(real_BKT, imaginary_BKT)).clamp(min=MIN_POWER).log10()


def peer_side(
    ours: ClapModel,
    device: torch.device,
    *,
    low: str,
    loop: Literal["open_clip", "LAION"] | None = None,
    noise: float = 0.0,
) -> Side:
    """`transformers.ClapModel` with the weights of ours at its best, or as in the training `loop` of open_clip or LAION-CLAP:
    torch's AdamW as it comes, and LAION's front end. (LAION's loop is fp16, which CPUs are slow at; here it is bf16.)

    Its window attention has only the eager form; its text attention goes through SDPA on CUDA and is eager on CPU, where
    SDPA's bf16 backward is several times slower.
    """
    hf_config: Any = config_to_transformers(ours.config)
    hf_config.audio_config.drop_path_rate = noise
    hf_config.audio_config.hidden_dropout_prob = hf_config.audio_config.attention_probs_dropout_prob = 0.0  # as LAION's
    hf_config.text_config.hidden_dropout_prob = hf_config.text_config.attention_probs_dropout_prob = noise
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
