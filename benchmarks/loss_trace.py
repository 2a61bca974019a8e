"""Command: what one rank's contrastive loss does on a GPU, forward and backward: kernels, memory traffic, FLOPs, most memory.

    python -m benchmarks.loss_trace [--ranks 1 64 512] [--micro_batch 616] [--joint_dim 512] [--output FILE.md]

Traced on fake tensors (`clap_ds.planning`), so that no GPU is needed and no time is told. `exact_local` is this project's
`SoftmaxLoss` with bf16 features, what torch.compile fuses counted as one kernel; `gather_with_gradient` the peer of
`benchmarks.loss_bench` under bf16 autocast. Collectives are left out. A pass is memory traffic of the size of both similarity
matrices in fp32, micro-batch × global batch each. `LOSS_PASSES` of `clap_ds.analysis.step_model` is made of these figures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import make_parser, show, table
from benchmarks.loss_bench import JOINT_DIM, gather_with_gradient
from clap_ds.config.errors import run_alone
from clap_ds.engine.loss import SoftmaxLoss
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.fake_ranks import rank_of
from clap_ds.planning.trace import Recorded, trace

COLUMNS = (
    "ranks {ranks} | loss {method} | kernels {kernels:,} | memory traffic, GB {gigabytes:,.2f} | passes {passes:.2f}"
    " | TFLOP {teraflops:.3f} | most memory, MB {peak_mb:,.0f}"
)


def exact_local(num_ranks: int, micro_batch: int, joint_dim: int) -> Recorded:
    """One of `num_ranks` ranks' loss, the gathered features among its memory."""
    with rank_of(num_ranks), FakeTensorMode(), like_cuda(), trace() as recorded:
        audio_BD, text_BD = (torch.empty(micro_batch, joint_dim, requires_grad=True) for _ in range(2))
        SoftmaxLoss(torch.bfloat16)(audio_BD, text_BD, torch.ones(1, requires_grad=True)).backward()
    return recorded


def with_gathered_gradient(num_ranks: int, micro_batch: int, joint_dim: int) -> Recorded:
    """The peer's, from features that have been gathered."""
    with FakeTensorMode(), like_cuda(), torch.autocast("cpu", torch.bfloat16), trace() as recorded:
        audio_ND, text_ND = (torch.empty(num_ranks * micro_batch, joint_dim) for _ in range(2))
        gather_with_gradient(audio_ND, text_ND, micro_batch, torch.ones(1))
    return recorded


METHODS = {"exact_local": exact_local, "gather_with_gradient": with_gathered_gradient}


def measure(method: str, num_ranks: int, micro_batch: int, joint_dim: int) -> dict[str, Any]:
    """A row of the table."""
    recorded = METHODS[method](num_ranks, micro_batch, joint_dim)
    num_bytes = recorded.total("bytes_moved")
    return {
        "ranks": num_ranks,
        "method": method,
        "kernels": recorded.total("launches"),
        "gigabytes": num_bytes / 1e9,
        "passes": num_bytes / (2 * 4 * num_ranks * micro_batch**2),
        "teraflops": recorded.total("flops") / 1e12,
        "peak_mb": recorded.peak_bytes / 1e6,
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loss_trace", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--micro_batch", type=int, default=616)
    parser.add_argument("--joint_dim", type=int, default=JOINT_DIM)
    arguments = parser.parse_args(argv)
    sizes = arguments.micro_batch, arguments.joint_dim
    rows = [measure(method, size, *sizes) for size in arguments.ranks for method in METHODS]
    text = (
        f"One rank's loss, forward and backward, as traced for a GPU: micro-batch {sizes[0]}, {sizes[1]} dimensions."
        f" A pass is once over both matrices of similarities in fp32.\n\n{table(COLUMNS, rows)}"
    )
    show(arguments.output, text, rows)


if __name__ == "__main__":
    run_alone(main)
