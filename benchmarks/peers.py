"""Command: this project's training step against `transformers.ClapModel`'s, side by side in one process.

    python -m benchmarks.peers [--micro-batch 8] [--text-tokens 77] [--precision bf16 fp32] [--rounds 8]

Both sides hold the same weights and take the same batch, and each round times one step of either, in turn, so that what else
the machine does falls on both. Every side runs at its best setting: bf16 by autocast or by cast weights with fp32 masters,
whichever is quicker for it, and the quicker text attention. HF's model takes log-mel features where ours takes waveforms: it
is given them by this project's front end on the same device, timed as part of its step. Its own extractor, which works clip
by clip in NumPy, is timed too and its cost shown apart. Random regularisation is off on both sides, or the losses could not
be compared; `--noise` times the steps with dropout 0.1 and compares losses that noise makes differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig, load_preset, preset_names
from clap_ds.config.settings import SyntheticData
from clap_ds.data.batch import Batch, build_batches
from clap_ds.dist.distributed import keep_freed_memory
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import LogMel
from clap_ds.native import adamw as adamw_native
from clap_ds.native.convert import convert
from clap_ds.native.library import unavailable
from clap_ds.record.clock import MedianInterval, median_interval, synchronize
from clap_ds.record.hardware import device_name
from clap_ds.weights.formats import to_transformers
from clap_ds.weights.hf_config import config_to_transformers, feature_extractor

import transformers  # isort: skip  (after torchaudio_compat)

PHASES = ("front_end", "forward", "backward", "optimizer", "step")
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest difference of the two losses, relative."""


def wall_clock(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def cpu_clock(device: torch.device) -> float:
    """CPU seconds of this process: with one thread, nearly what an idle machine's wall clock would say on a busy one."""
    synchronize(device)
    return time.process_time()


CLOCKS = {"wall": wall_clock, "cpu": cpu_clock}


class MasterAdamW:
    """torch's fused AdamW; 16-bit parameters get fp32 masters, which it steps and copies back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.low = [parameter for parameter in parameters if parameter.dtype != torch.float32]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.low]
        whole = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        self.parameters = parameters
        self.adam = torch.optim.AdamW([*whole, *self.masters], lr=1e-6, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, low in zip(self.masters, self.low, strict=True):
            if master.grad is None:
                master.grad = torch.empty_like(master)
            if low.grad is None:
                master.grad.zero_()
            else:
                master.grad.copy_(low.grad)
        self.adam.step()
        for master, low in zip(self.masters, self.low, strict=True):
            low.copy_(master)
        for parameter in self.parameters:
            parameter.grad = None


class NativeMasterAdamW(MasterAdamW):
    """The same update by this project's CPU kernel for the bf16 parameters, without copies of gradients and masters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        gradients = [torch.zeros_like(low) if low.grad is None else low.grad.contiguous() for low in self.low]
        options = {name: self.adam.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        adamw_native.native_adamw(
            self.low, gradients, self.masters, self.exp_avgs, self.exp_avg_sqs, step=self.steps, **options
        )
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Side:
    """One implementation, ready to step.

    Attributes:
        prepare: batch → what `loss` takes; timed as the front end.
        loss: → scalar.
        steps_natively: by this project's kernel instead of torch's.
    """

    name: str
    model: nn.Module
    prepare: Callable[[Batch], tuple[Any, ...]]
    loss: Callable[..., Tensor]
    autocast: bool
    steps_natively: bool = False
    now: Callable[[torch.device], float] = wall_clock
    optimizer: MasterAdamW = field(init=False)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = NativeMasterAdamW(trained) if self.steps_natively else MasterAdamW(trained)

    def step(self, batch: Batch) -> None:
        """One training step, every phase timed with the device synchronised at its edges."""
        now = self.now
        edges = [now(batch.device)]
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.autocast):
            inputs = self.prepare(batch)
            edges.append(now(batch.device))
            loss = self.loss(*inputs)
        edges.append(now(batch.device))
        loss.backward()
        edges.append(now(batch.device))
        self.optimizer.step()
        edges.append(now(batch.device))
        durations = [after - before for before, after in itertools.pairwise(edges)]
        for phase, seconds in zip(PHASES, [*durations, edges[-1] - edges[0]], strict=True):
            self.seconds[phase].append(seconds)
        self.losses.append(float(loss.detach()))


def softmax_loss(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss over one batch."""
    logits = scale * audio.float() @ text.float().T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def our_side(
    name: str,
    state: dict[str, Tensor],
    config: ClapConfig,
    device: torch.device,
    *,
    low: str,
    noise: float,
    **options: Any,
) -> Side:
    """This project's model. `low`: `autocast`, `cast` or, for fp32, `none`."""
    model = ClapModel(config, drop_path=noise, text_dropout=noise, spec_augment=noise > 0, **options)
    model.load_state_dict(state)
    model.to(device)
    if low == "cast":
        model.to(torch.bfloat16)
    if device.type == "cpu":
        convert(model)

    def prepare(batch: Batch) -> tuple[Any, ...]:
        return batch.model_inputs()

    return Side(
        *(name, model.train(), prepare, lambda *inputs: softmax_loss(*model(*inputs)), low == "autocast"),
        steps_natively=low == "cast" and device.type == "cpu" and not unavailable(),
    )


def peer_side(
    name: str, state: dict[str, Tensor], config: ClapConfig, device: torch.device, *, low: str, noise: float
) -> Side:
    """`transformers.ClapModel`. Its window attention has only the eager form; its text attention goes through SDPA on CUDA and
    is eager on CPU, where SDPA's bf16 backward is several times slower."""
    hf_config: Any = config_to_transformers(config)
    hf_config.audio_config.drop_path_rate = noise
    hf_config.audio_config.hidden_dropout_prob = hf_config.audio_config.attention_probs_dropout_prob = 0.0  # as LAION's
    hf_config.text_config.hidden_dropout_prob = hf_config.text_config.attention_probs_dropout_prob = noise
    model: Any = transformers.ClapModel(hf_config)
    model.load_state_dict(to_transformers(state), strict=False)
    if device.type == "cuda":
        # ClapTextModel doesn't declare that it can, but its attention goes through the same interface as RoBERTa's.
        model.text_model.config._attn_implementation = "sdpa"
    model.to(device)
    if low == "cast":
        model.to(torch.bfloat16)
    mel = LogMel(config.audio).to(device)
    if device.type == "cpu":
        convert(mel)

    def prepare(batch: Batch) -> tuple[Any, ...]:
        features = mel(batch.waveforms)[:, None]
        mask = batch.attention_mask if batch.num_tokens < batch.input_ids.numel() else None
        return features.to(model.dtype), batch.input_ids, mask

    def loss(features: Tensor, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        output = model(input_features=features, input_ids=input_ids, attention_mask=mask)
        return softmax_loss(output.audio_embeds, output.text_embeds, model.logit_scale_a.float().exp())

    return Side(name, model.train(), prepare, loss, low == "autocast")


def initial_state(config: ClapConfig) -> dict[str, Tensor]:
    """Fresh weights with batch-norm statistics of real size, so that the losses depend on the inputs."""
    torch.manual_seed(0)
    model = ClapModel(config)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def alternate(sides: list[Side], batch: Batch, rounds: int) -> None:
    """Steps of all sides in turn; the order is reversed in every second round, and two warm-up rounds are dropped."""
    for number in range(rounds + 2):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.step(batch)
    for side in sides:
        for phase in PHASES:
            del side.seconds[phase][:2]


def ratios(ours: Side, peer: Side, phase: str) -> MedianInterval:
    """How many times as fast as the peer, round by round; the front end counts as part of the forward pass."""
    names = ("front_end", "forward") if phase == "forward" else (phase,)
    mine = [sum(each) for each in zip(*(ours.seconds[name] for name in names), strict=True)]
    theirs = [sum(each) for each in zip(*(peer.seconds[name] for name in names), strict=True)]
    return median_interval([their / my for my, their in zip(mine, theirs, strict=True)])


def extractor_seconds(batch: Batch, config: ClapConfig) -> float:
    """Seconds HF's own feature extractor takes for the batch."""
    extractor = feature_extractor(config.audio)
    clips = list(batch.waveforms.cpu().numpy())
    started_s = time.perf_counter()
    extractor(clips, sampling_rate=config.audio.sample_rate, return_tensors="pt")
    return time.perf_counter() - started_s


def build_sides(arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device) -> list[Side]:
    """Every side of one precision, ours first."""
    state = initial_state(config)
    modes = {"fp32": ["none"], "bf16": arguments.modes}[precision]
    noise = 0.1 if arguments.noise else 0.0
    ours = [
        our_side(f"ours, {mode}", state, config, device, low=mode, noise=noise, **arguments.options) for mode in modes
    ]
    peers = [peer_side(f"transformers, {mode}", state, config, device, low=mode, noise=noise) for mode in modes]
    return [*ours, *peers]


def compare(arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device) -> dict[str, Any]:
    """Time one precision; returns the result as JSON can hold it."""
    batch = make_batch(arguments, config, device)
    sides = build_sides(arguments, config, precision, device)
    for side in sides:
        side.now = CLOCKS[arguments.clock]
    alternate(sides, batch, arguments.rounds)
    median = {side.name: {phase: statistics.median(side.seconds[phase]) for phase in PHASES} for side in sides}
    half = len(sides) // 2
    ours, peer = (min(group, key=lambda side: median[side.name]["step"]) for group in (sides[:half], sides[half:]))
    difference = abs(ours.losses[0] - peer.losses[0]) / abs(peer.losses[0])
    return {
        "precision": precision,
        "ours": ours.name,
        "peer": peer.name,
        "median_s": median,
        "speed_ratio": {
            phase: vars(ratios(ours, peer, phase)) for phase in ("forward", "backward", "optimizer", "step")
        },
        "samples_per_s": arguments.micro_batch / median[ours.name]["step"],
        "first_loss": {side.name: side.losses[0] for side in sides},
        "loss_difference": difference,
        "loss_agrees": difference < TOLERANCE[precision],
        "extractor_s": extractor_seconds(batch, config),
    }


def make_batch(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> Batch:
    """Noise and random captions on the device."""
    low, high = arguments.caption_lengths or (arguments.text_tokens, arguments.text_tokens)
    lengths = {str(length): 1.0 for length in range(low, high + 1)}
    data = SyntheticData(source="synthetic", placement="device", caption_lengths=lengths, num_batches=1)
    with build_batches(
        data,
        model=config,
        text_tokens=arguments.text_tokens,
        micro_batch=arguments.micro_batch,
        rank=0,
        world_size=1,
        seed=0,
        device=device,
        pack_captions=arguments.text == "packed",
    ) as batches:
        return next(batches)


def show(result: dict[str, Any]) -> str:
    """Lines for the terminal."""
    lines = [f"{result['precision']}:"]
    for name, seconds in result["median_s"].items():
        parts = "  ".join(f"{phase} {1000 * value:8.1f}" for phase, value in seconds.items())
        lines.append(f"  {name:24} ms  {parts}  loss {result['first_loss'][name]:.5f}")
    for phase, ratio in result["speed_ratio"].items():
        interval = f"[{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.append(f"  {phase:9}  {ratio['median']:.2f} × the peer's speed  {interval} ({ratio['coverage']:.0%})")
    best = result["median_s"][result["peer"]]
    extracted = (best["step"] - best["front_end"] + result["extractor_s"]) / result["median_s"][result["ours"]]["step"]
    lines.append(f"  step with HF's own feature extractor ({1000 * result['extractor_s']:.0f} ms): {extracted:.2f} ×")
    lines.append(
        f"  losses differ by {result['loss_difference']:.1e}: {'agree' if result['loss_agrees'] else 'DISAGREE'}"
    )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="htsat_tiny_roberta_base", choices=preset_names())
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=77)
    parser.add_argument(
        "--caption-lengths", type=int, nargs=2, metavar=("LOW", "HIGH"), help="uniform; default: all of --text-tokens"
    )
    parser.add_argument("--text", choices=("padded", "packed"), default="padded", help="our text tower's way")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--modes", nargs="+", choices=("autocast", "cast"), default=["autocast", "cast"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: for one thread on a machine that others use too"
    )
    parser.add_argument("--noise", action="store_true", help="dropout, drop path and SpecAugment while timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--plain_allocator",
        action="store_true",
        help="leave the C library's as it is, for both; else as our CPU ranks set it",
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args(argv)
    arguments.options = {"attention": "auto"}
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device, config = torch.device(arguments.device), load_preset(arguments.preset)
    if device.type == "cpu" and not arguments.plain_allocator:
        keep_freed_memory()
    print(
        f"{config.title} on {device_name(device)}, {torch.get_num_threads()} threads, micro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens, {arguments.text}"
    )
    results = []
    for precision in arguments.precision:
        results.append(compare(arguments, config, precision, device))
        print(show(results[-1]), flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
