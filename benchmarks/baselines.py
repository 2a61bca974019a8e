"""Training steps that `benchmarks.compare_baselines` times, with the same weights and batch: this
project's, that of transformers' towers, and the training loops of open_clip and LAION-CLAP."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import LossSettings, ModelSettings, SyntheticData
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import build_batches
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model
from clap_ds.engine.loss import build_loss
from clap_ds.flop_count.published_model import ConvolutionMel
from clap_ds.metrics.timers import StepTimer, seconds
from clap_ds.model.clap import Projection
from clap_ds.model.htsat import MAX_MEL_STRIPE, MAX_TIME_STRIPE, NUM_STRIPES
from clap_ds.model.mel import LogMel
from clap_ds.model.text import mean_over_tokens
from clap_ds.weights.formats import to_transformers
from clap_ds.weights.key_mapping import State, config_to_transformers

import transformers  # isort: skip  (after torchaudio_compat)


def make_batch(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> Batch:
    """Return a batch of noise and random captions for the options of
    `benchmarks.compare_baselines`."""
    # Without a range, all captions fill the context.
    low, high = arguments.caption_lengths or (arguments.context_length, arguments.context_length)
    data = SyntheticData(
        source="synthetic",
        placement="device",
        # All lengths are equally likely.
        caption_lengths={str(length): 1.0 for length in range(low, high + 1)},
        num_batches=1,
    )
    options: Any = {
        "model": config,
        "device": device,
        "pack_captions": arguments.text == "packed",
        "context_length": arguments.context_length,
        "micro_batch": arguments.micro_batch,
    }
    with build_batches(data, **options, rank=0, world_size=1, seed=0) as batches:
        return next(batches)


class EngineSide:
    """One rank's step with `ClapEngine`, as in `clap_ds/bench.py`. Needs an initialized process
    group.

    Attributes:
        weights: initial weights with `transformers` names.
    """

    def __init__(
        self, arguments: argparse.Namespace, precision: str, batch: Batch, *, spec_augment: bool
    ) -> None:
        settings = ModelSettings(
            preset=arguments.preset, drop_path=0.0, text_dropout=0.0, spec_augment=spec_augment
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": arguments.micro_batch,
            "gradient_clipping": 0.0,
            "log_level": "error",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
            "bf16": {"enabled": precision == "bf16"},
        }
        # All sides start from these weights.
        torch.manual_seed(0)
        model = build_model(settings, LossSettings(), batch.device).to(batch.device)
        weights = to_transformers(model.state_dict())
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.engine = ClapEngine(model, build_loss(LossSettings(), precision), config)
        self.losses = list[float]()

    def step(self, batch: Batch) -> dict[str, float]:
        """Time a step as `Side.step` does; `forward` includes the loss, and `step` all other work
        of the engine."""
        # The engine marks its own phases.
        timer = self.engine.timer
        timer.start(instrumented=True)

        def step() -> None:
            self.losses.append(float(self.engine.step(iter([batch]))))

        step_s = seconds(step, batch.device)
        timer.mark()
        (parts,) = timer.stop().phases_s
        # In `Side.step`, too, the loss is part of the forward pass.
        return {**parts, "forward": parts["forward"] + parts["loss"], "step": step_s}


class MasterAdamW:
    """torch's fused AdamW with fp32 master weights of 16-bit parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        # 16-bit parameters, and what the optimizer steps in their place.
        self.low = [parameter for parameter in parameters if parameter.dtype != torch.float32]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.low]
        fp32 = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        self.adam = torch.optim.AdamW([*fp32, *self.masters], lr=1e-6, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, low in zip(self.masters, self.low, strict=True):
            if master.grad is None:
                master.grad = torch.empty_like(master)
            # An unused parameter has no gradient.
            master.grad.copy_(torch.zeros_like(low) if low.grad is None else low.grad)
        self.adam.step()
        for master, low in zip(self.masters, self.low, strict=True):
            low.copy_(master)


class Side:
    """A baseline with our weights.

    Captions are padded as each program pads them: by the loops to the context length, for
    `transformers` to the batch's longest.

    Args:
        weights: with `transformers` names.
        kind: `open_clip` or `LAION-CLAP` for their training loops, or `transformers` for its towers
            with this project's front end and torch's fused AdamW. LAION's fp16 is bf16 here,
            because CPUs are slow at fp16.
        low: use of bf16: `autocast`, `cast` with fp32 master weights, or `none`.
    """

    def __init__(
        self,
        config: ClapConfig,
        weights: State,
        kind: str,
        low: str,
        device: torch.device,
        *,
        spec_augment: bool,
    ) -> None:
        is_loop = kind != "transformers"
        model: Any = LoopModel(config, make_sizes(config), spec_augment=spec_augment)
        # Not strict: heads of `transformers` aren't used.
        model.load_state_dict(weights, strict=False)
        # Text attention uses SDPA on CUDA, and eager code on CPUs, where SDPA's bf16 backward pass
        # is several times slower.
        model.text_model.config._attn_implementation = "sdpa" if device.type == "cuda" else "eager"
        self.model = model.train().to(device, torch.bfloat16 if low == "cast" else None)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = loop_adamw(parameters) if is_loop else MasterAdamW(parameters)
        front_end = ConvolutionMel if kind == "LAION-CLAP" else LogMel
        self.mel = front_end(config.audio).to(device)
        if not is_loop and device.type == "cpu":
            # Both sides have the same front end.
            patch_model(self.mel)
        self.low = low
        self.losses = list[float]()
        self.pads_to_longest = not is_loop

    def step(self, batch: Batch) -> dict[str, float]:
        """Run a step and return the seconds of its parts, synchronizing the device between them,
        and of the whole."""
        length = batch.input_ids.shape[1]
        if self.pads_to_longest:
            length = int(batch.attention_mask.sum(dim=1).max())
        input_ids = batch.input_ids[:, :length]
        is_full = batch.num_tokens == input_ids.numel()
        # Attention without a mask is faster.
        mask = None if is_full else batch.attention_mask[:, :length]
        timer = StepTimer(batch.device)
        timer.start(instrumented=True)
        autocast = torch.autocast(batch.device.type, torch.bfloat16, enabled=self.low == "autocast")
        with timer("forward"), autocast:
            features = self.mel(batch.audio)[:, None].to(next(self.model.parameters()).dtype)
            loss = softmax_loss(*self.model(features, input_ids, mask))
        with timer("backward"):
            loss.backward()
        with timer("optimizer"):
            self.optimizer.step()
            self.model.zero_grad()
        # Waits for the device.
        self.losses.append(float(loss.detach()))
        timer.mark()
        (parts,) = timer.stop().phases_s
        return {**parts, "step": sum(parts.values())}


def make_sizes(config: ClapConfig) -> Any:
    """Return a preset as a `transformers` configuration, without dropout and stochastic depth."""
    # Towers of `transformers` need heads of their own kind; they aren't used.
    head = config.audio.projection.model_copy(update={"hidden_dim": config.joint_dim, "bias": True})
    audio = config.audio.model_copy(update={"projection": head})
    text = config.text.model_copy(update={"projection": head, "pooling": "cls_pooler"})
    sizes: Any = config_to_transformers(config.model_copy(update={"audio": audio, "text": text}))
    sizes.audio_config.drop_path_rate = 0.0
    for tower in (sizes.audio_config, sizes.text_config):
        tower.hidden_dropout_prob = 0.0
        tower.attention_probs_dropout_prob = 0.0
    return sizes


def softmax_loss(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * audio.float() @ text.float().T
    # Pair i is row i and column i.
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def mask_in_a_loop(normed_BFT1: Tensor) -> Tensor:
    """Apply SpecAugment to a batch norm's output as torchlibrosa does in LAION-CLAP and open_clip:
    clip by clip and stripe by stripe, in place on a view. In the backward pass, each write copies
    the whole batch's gradient."""
    # Time and mel bins become the last dimensions; it is a view.
    mel_B1TF = normed_BFT1.transpose(1, 3)
    for dim, limit in ((2, MAX_TIME_STRIPE), (3, MAX_MEL_STRIPE)):
        for number in range(len(mel_B1TF)):
            clip = mel_B1TF[number]
            for _ in range(NUM_STRIPES):
                width = int(torch.randint(0, limit, (1,)))
                start = int(torch.randint(0, mel_B1TF.shape[dim] - width, (1,)))
                clip.narrow(dim - 1, start, width).zero_()
    return mel_B1TF.transpose(1, 3)


class LoopModel(nn.Module):
    """CLAP as in LAION-CLAP and open_clip: transformers' text tower and port of their HTSAT (both
    of `sizes`), any heads."""

    def __init__(self, config: ClapConfig, sizes: Any, *, spec_augment: bool) -> None:
        super().__init__()
        self.takes_mean = config.text.pooling == "mean"
        self.audio_model: Any = transformers.ClapAudioModel(sizes.audio_config)
        self.text_model: Any = transformers.ClapTextModel(
            sizes.text_config, add_pooling_layer=not self.takes_mean
        )
        self.audio_projection = Projection(
            config.audio.output_dim, config.joint_dim, config.audio.projection
        )
        self.text_projection = Projection(
            config.text.hidden_size, config.joint_dim, config.text.projection
        )
        self.logit_scale_a = nn.Parameter(torch.zeros(()))
        if spec_augment:
            batch_norm = self.audio_model.audio_encoder.batch_norm
            # Both programs mask behind the batch norm.
            batch_norm.register_forward_hook(lambda _, __, normed: mask_in_a_loop(normed))

    def forward(
        self, features: Tensor, input_ids: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return both embeddings (B, D) and the logit scale. `features`: log-mel (B, 1, T, F)."""
        audio = self.audio_projection(self.audio_model(input_features=features).pooler_output)
        text = self.text_model(input_ids=input_ids, attention_mask=mask)
        pooled = text.pooler_output
        if self.takes_mean:
            pooled = mean_over_tokens(text.last_hidden_state, mask)
        return audio, self.text_projection(pooled), self.logit_scale_a.float().exp()


def loop_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW as in open_clip and LAION-CLAP: torch's default kernel, no weight decay of
    biases and norms."""
    large = [parameter for parameter in parameters if parameter.ndim >= 2]
    small = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": large, "weight_decay": 0.2}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-6)
