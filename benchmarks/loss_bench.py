"""Command: time and memory of the contrastive loss at large global batches, against gather-with-gradient and full logits.

    python -m benchmarks.loss_bench [--global_batches 1024 16384 315392] [--micro_batch 616] [--output FILE.md]

One rank's share of the work, forward and backward, on random features; what other ranks would send is drawn at random, so
that the network plays no part. The peer keeps open_clip's formulation: this rank's rows against everybody's columns, twice,
with gradients also for everybody's features. Memory is the tensors' beyond the gathered features.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import allocated_peak, choose_device, in_turns, make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.engine.tiles import Positives, tiled_row_sums, tiled_softmax_gradient
from clap_ds.record.clock import seconds
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

JOINT_DIM, SCALE = 512, 14.3
COLUMNS = (
    "global batch {global_batch:,} | exact local, s {exact_local[seconds]:.4f}"
    " | gather-with-gradient, s {gather_with_gradient[seconds]:.4f} | time ratio {ratio:.2f}"
    " | exact local, MB {exact_local[peak_mb]:,.1f} | gather-with-gradient, MB {gather_with_gradient[peak_mb]:,.1f}"
)


def exact_local(audio_ND: Tensor, text_ND: Tensor, micro_batch: int, scale: Tensor) -> list[Tensor]:
    """Gradients of rank 0's features, in tiles; the other ranks' log-sum-exps are stood in for by rank 0's mean."""
    positives = Positives(slice(0, micro_batch), len(audio_ND), None, like=scale)
    pairs = (audio_ND[:micro_batch], text_ND), (text_ND[:micro_batch], audio_ND)
    own = [tiled_row_sums(*pair, scale, positives)[0] for pair in pairs]
    everyone = [each.mean().expand(len(audio_ND)) for each in reversed(own)]
    sums = zip(pairs, own, everyone, strict=True)
    return [tiled_softmax_gradient(*pair, lse_B, lse_N, scale, positives)[0] for pair, lse_B, lse_N in sums]


def gather_with_gradient(audio_ND: Tensor, text_ND: Tensor, micro_batch: int, scale: Tensor) -> tuple[Tensor, ...]:
    """Gradients of everybody's features from rank 0's rows, which a reduce-scatter would then add up."""
    all_audio, all_text = (features.float().requires_grad_() for features in (audio_ND, text_ND))
    targets = torch.arange(micro_batch, device=audio_ND.device)
    rows, columns = scale * all_audio[:micro_batch] @ all_text.T, scale * all_text[:micro_batch] @ all_audio.T
    loss = (F.cross_entropy(rows, targets) + F.cross_entropy(columns, targets)) / 2
    return torch.autograd.grad(loss, (all_audio, all_text))


METHODS: dict[str, Callable[..., Any]] = {"exact_local": exact_local, "gather_with_gradient": gather_with_gradient}


def work(sizes: tuple[int, int], device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """One rank's loss by each method, ready to run on the same random rows of length 1; `sizes` are global and micro-batch."""
    torch.manual_seed(0)
    features = [F.normalize(torch.randn(sizes[0], JOINT_DIM, device=device), dim=1).to(dtype) for _ in range(2)]
    scale = torch.tensor([SCALE], device=device)
    return {name: partial(method, *features, sizes[1], scale) for name, method in METHODS.items()}


def peak_bytes(method: str, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype) -> int:
    """Most bytes of tensors alive at a time in a method's work, beyond the features; on a CPU right only once in a process."""
    action = work(sizes, device, dtype)[method]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(action, device)
        return torch.cuda.max_memory_allocated() - before
    return allocated_peak(lambda: action)


def measure(sizes: tuple[int, int], repeats: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds and peak memory of every method; `sizes` are global batch and micro-batch."""
    actions = {name: partial(seconds, action, device) for name, action in work(sizes, device, dtype).items()}
    row: dict[str, Any] = {"global_batch": sizes[0]}
    for name, times in in_turns(actions, repeats, warm_up=1).items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a second profile in one process misses frees
            peak = pool.apply(peak_bytes, (name, sizes, device, dtype))
        row[name] = {"seconds": median_interval(times).median, "peak_mb": peak / 1e6}
    return {**row, "ratio": row["exact_local"]["seconds"] / row["gather_with_gradient"]["seconds"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loss_bench", __doc__)
    parser.add_argument("--global_batches", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 315392])
    parser.add_argument("--micro_batch", type=int, default=616)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--features", choices=("float32", "bfloat16"), help="type of the features; bfloat16 on a GPU")
    arguments, device = parser.parse_args(argv), choose_device()
    micro_batch = arguments.micro_batch
    if min(arguments.global_batches) < micro_batch:
        raise UserError(f"--global_batches: expected none below the micro-batch of {micro_batch}")
    name = arguments.features or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = getattr(torch, name)
    rows = [measure((size, micro_batch), arguments.repeats, device, dtype) for size in arguments.global_batches]
    text = (
        f"One rank's loss, forward and backward, on {device_name(device)}: micro-batch {micro_batch}, {JOINT_DIM} dimensions,"
        f" features in {name}. Memory is beyond the gathered features.\n\n{table(COLUMNS, rows)}"
    )
    show(arguments.output, text, rows)


if __name__ == "__main__":
    run_alone(main)
