"""Command: time and memory of the contrastive loss at large global batches, against gather-with-gradient and full logits.

    python -m benchmarks.loss_bench [--global_batches 1024 16384 315392] [--micro_batch 616] [--output DIR]

One rank's share of the work, forward and backward, on random features; what other ranks would send is drawn at random, so
that the network plays no part. The peer keeps open_clip's formulation: this rank's rows against everybody's columns, twice,
with gradients also for everybody's features. Memory is the tensors' beyond the gathered features.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from clap_ds.engine.loss import tiled_log_sum_exp, tiled_softmax_gradient
from clap_ds.record.clock import synchronize
from clap_ds.record.hardware import device_name

GLOBAL_BATCHES = (1024, 4096, 16384, 65536, 315392)
JOINT_DIM = 512
SCALE = 14.3
TILE = 4096


def exact_local(audio_ND: Tensor, text_ND: Tensor, micro_batch: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rank 0's features, in tiles; the other ranks' log-sum-exps are stood in for by rank 0's mean."""
    own_audio, own_text = audio_ND[:micro_batch], text_ND[:micro_batch]
    rows, columns = (
        tiled_log_sum_exp(own_audio, text_ND, scale, TILE),
        tiled_log_sum_exp(own_text, audio_ND, scale, TILE),
    )
    all_rows, all_columns = (own.mean().expand(len(audio_ND)) for own in (rows, columns))
    audio_gradient, _ = tiled_softmax_gradient(own_audio, text_ND, rows, all_columns, 0, scale, TILE)
    text_gradient, _ = tiled_softmax_gradient(own_text, audio_ND, columns, all_rows, 0, scale, TILE)
    return audio_gradient, text_gradient


def gather_with_gradient(audio_ND: Tensor, text_ND: Tensor, micro_batch: int, scale: Tensor) -> tuple[Tensor, ...]:
    """Gradients of everybody's features from rank 0's rows, which a reduce-scatter would then add up."""
    all_audio, all_text = (features.float().requires_grad_() for features in (audio_ND, text_ND))
    targets = torch.arange(micro_batch, device=audio_ND.device)
    rows, columns = scale * all_audio[:micro_batch] @ all_text.T, scale * all_text[:micro_batch] @ all_audio.T
    loss = (F.cross_entropy(rows, targets) + F.cross_entropy(columns, targets)) / 2
    return torch.autograd.grad(loss, (all_audio, all_text))


METHODS: dict[str, Callable[..., Any]] = {"exact_local": exact_local, "gather_with_gradient": gather_with_gradient}


def _features(global_batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    audio, text = (
        F.normalize(torch.randn(global_batch, JOINT_DIM, device=device, generator=generator), dim=1).to(dtype)
        for _ in range(2)
    )
    return audio, text


def _time_s(method: str, features: tuple[Tensor, Tensor], micro_batch: int, device: torch.device) -> float:
    scale = torch.tensor([SCALE], device=device)
    synchronize(device)
    started_s = time.perf_counter()
    METHODS[method](*features, micro_batch, scale)
    synchronize(device)
    return time.perf_counter() - started_s


def peak_bytes(method: str, features: tuple[Tensor, Tensor], micro_batch: int, device: torch.device) -> int:
    """Most bytes of tensors alive at a time, beyond the features; right only once in a process on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _time_s(method, features, micro_batch, device)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _time_s(method, features, micro_batch, device)
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def _peak_bytes_of_a_fresh_process(method: str, global_batch: int, micro_batch: int, dtype: torch.dtype) -> int:
    """A second profile in one process misses frees."""
    command = [sys.executable, "-m", "benchmarks.loss_bench", "--memory_of", method]
    command += ["--global_batches", str(global_batch), "--micro_batch", str(micro_batch)]
    command += ["--features", str(dtype).removeprefix("torch.")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure(
    global_batch: int, micro_batch: int, repeats: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    features = _features(global_batch, device, dtype)
    for method in METHODS:
        _time_s(method, (features[0][:1024], features[1][:1024]), min(micro_batch, 512), device)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method in METHODS:
            seconds[method].append(_time_s(method, features, micro_batch, device))
    row: dict[str, Any] = {"global_batch": global_batch}
    for method in METHODS:
        if device.type == "cuda":
            peak = peak_bytes(method, features, micro_batch, device)
        else:
            peak = _peak_bytes_of_a_fresh_process(method, global_batch, micro_batch, dtype)
        row[method] = {"seconds": statistics.median(seconds[method]), "peak_bytes": peak}
    return row


def _table(rows: list[dict[str, Any]], device: torch.device, micro_batch: int, dtype: torch.dtype) -> str:
    lines = [
        f"One rank's loss, forward and backward, on {device_name(device)}: micro-batch {micro_batch}, {JOINT_DIM} dimensions, "
        f"features in {str(dtype)[6:]}. Memory is beyond the gathered features.",
        "",
        "| global batch | exact local, s | gather-with-gradient, s | time ratio | exact local, MB | gather-with-gradient, MB |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        exact, peer = row["exact_local"], row["gather_with_gradient"]
        lines.append(
            f"| {row['global_batch']:,} | {exact['seconds']:.4f} | {peer['seconds']:.4f} |"
            f" {exact['seconds'] / peer['seconds']:.2f} | {exact['peak_bytes'] / 1e6:,.1f} | {peer['peak_bytes'] / 1e6:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.loss_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--global_batches", type=int, nargs="+", default=GLOBAL_BATCHES)
    parser.add_argument("--micro_batch", type=int, default=616)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--features", choices=("float32", "bfloat16"), help="type of the features; bfloat16 on a GPU")
    parser.add_argument("--memory_of", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="folder for loss.json and loss.md")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, arguments.features or ("bfloat16" if device.type == "cuda" else "float32"))
    if arguments.memory_of:
        features = _features(arguments.global_batches[0], device, dtype)
        print(peak_bytes(arguments.memory_of, features, arguments.micro_batch, device))
        return 0
    if min(arguments.global_batches) < arguments.micro_batch:
        parser.error(f"a global batch below the micro-batch of {arguments.micro_batch}")
    rows = [
        _measure(size, arguments.micro_batch, arguments.repeats, device, dtype) for size in arguments.global_batches
    ]
    table = _table(rows, device, arguments.micro_batch, dtype)
    print(table)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "loss.json").write_text(json.dumps(rows, indent=2) + "\n")
        command = " ".join(["python", "-m", "benchmarks.loss_bench", *sys.argv[1:]])
        (arguments.output / "loss.md").write_text(f"`{command}`\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
