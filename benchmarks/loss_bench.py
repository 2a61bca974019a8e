"""Command: time and memory of the contrastive loss at large global batches, against gather-with-gradient and full logits.

    python -m benchmarks.loss_bench [--global_batches 1024 16384 315392] [--micro_batch 616] [--traced] [--output FILE.md]

One rank's share of the work, forward and backward, on random features; what other ranks would send is drawn at random, so
that the network plays no part. The peer keeps open_clip's formulation: this rank's rows against everybody's columns, twice,
with gradients also for everybody's features. Memory is the tensors' beyond the gathered features.

`--traced` needs no GPU and tells no time: what the loss does on one, on fake tensors (`clap_ds.planning`), with bf16 features
and without collectives. What torch.compile fuses counts as one kernel; a pass is memory traffic of the size of both similarity
matrices in fp32. `LOSS_PASSES` of `clap_ds.analysis.step_model` is made of these figures.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import allocated_peak, choose_device, in_turns, make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.engine.loss import SoftmaxLoss
from clap_ds.engine.tiles import tiled_row_sums, tiled_softmax_gradient
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.fake_ranks import rank_of
from clap_ds.planning.trace import Recorded, trace
from clap_ds.record.clock import seconds
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

JOINT_DIM, SCALE = 512, 14.3
COLUMNS = (
    "global batch {global_batch:,} | exact local, s {exact_local[seconds]:.4f}"
    " | gather-with-gradient, s {gather_with_gradient[seconds]:.4f} | time ratio {ratio:.2f}"
    " | exact local, MB {exact_local[peak_mb]:,.1f} | gather-with-gradient, MB {gather_with_gradient[peak_mb]:,.1f}"
)
TRACED = (
    "ranks {ranks} | loss {method} | kernels {kernels:,} | memory traffic, GB {gigabytes:,.2f} | passes {passes:.2f}"
    " | TFLOP {teraflops:.3f} | most memory, MB {peak_mb:,.0f}"
)


def exact_local(audio_ND: Tensor, text_ND: Tensor, micro_batch: int, scale: Tensor) -> list[Tensor]:
    """Gradients of rank 0's features, in tiles; the other ranks' log-sum-exps are stood in for by rank 0's mean."""
    pairs = (audio_ND[:micro_batch], text_ND), (text_ND[:micro_batch], audio_ND)
    own = [tiled_row_sums(*pair, scale, 0)[0] for pair in pairs]
    everyone = [each.mean().expand(len(audio_ND)) for each in reversed(own)]
    sums = zip(pairs, own, everyone, strict=True)
    return [tiled_softmax_gradient(*pair, lse_B, lse_N, scale, 0)[0] for pair, lse_B, lse_N in sums]


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


def recorded(method: str, num_ranks: int, micro_batch: int, joint_dim: int) -> Recorded:
    """One of `num_ranks` ranks' loss as a GPU would compute it, the gathered features among its memory."""
    with rank_of(num_ranks), FakeTensorMode(), like_cuda(), trace() as found:
        if method == "exact_local":
            audio_BD, text_BD = (torch.empty(micro_batch, joint_dim, requires_grad=True) for _ in range(2))
            SoftmaxLoss(torch.bfloat16)(audio_BD, text_BD, torch.ones(1, requires_grad=True)).backward()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                audio_ND, text_ND = (torch.empty(num_ranks * micro_batch, joint_dim) for _ in range(2))
                gather_with_gradient(audio_ND, text_ND, micro_batch, torch.ones(1))
    return found


def traced(method: str, num_ranks: int, micro_batch: int, joint_dim: int) -> dict[str, Any]:
    """A row of the traced table."""
    found = recorded(method, num_ranks, micro_batch, joint_dim)
    num_bytes = found.total("bytes_moved")
    return {
        "ranks": num_ranks,
        "method": method,
        "kernels": found.total("launches"),
        "gigabytes": num_bytes / 1e9,
        "passes": num_bytes / (2 * 4 * num_ranks * micro_batch**2),
        "teraflops": found.total("flops") / 1e12,
        "peak_mb": found.peak_bytes / 1e6,
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loss_bench", __doc__)
    parser.add_argument("--global_batches", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 315392])
    parser.add_argument("--micro_batch", type=int, default=616)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traced", action="store_true", help="what a GPU would do, by the global batches' ranks")
    arguments, device = parser.parse_args(argv), choose_device()
    micro_batch = arguments.micro_batch
    if min(arguments.global_batches) < micro_batch:
        raise UserError(f"--global_batches: expected none below the micro-batch of {micro_batch}")
    what = f"One rank's loss, forward and backward, micro-batch {micro_batch}, {JOINT_DIM} dimensions"
    if arguments.traced:
        ranks = [size // micro_batch for size in arguments.global_batches]
        rows = [traced(method, number, micro_batch, JOINT_DIM) for number in ranks for method in METHODS]
        show(arguments.output, f"{what}, as traced for a GPU.\n\n{table(TRACED, rows)}", rows)
        return
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = [measure((size, micro_batch), arguments.repeats, device, dtype) for size in arguments.global_batches]
    text = f"{what}, on {device_name(device)}, features in {dtype}. Memory is beyond the gathered features."
    show(arguments.output, f"{text}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
