"""Measure what SpecAugment's writes clip by clip cost in a training step, beside one mask of the
batch.

    python -m benchmarks.specaugment [--clips 4 16 64] [--output FILE.md]

open_clip and LAION-CLAP mask the output of a trained batch norm in place, on views, stripe by
stripe. In the backward pass each write copies the gradient of the whole batch: 4 B + 1 copies for B
clips. One multiplication by a mask needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.baselines import mask_in_a_loop
from benchmarks.common import make_parser, show, table
from clap_ds.metrics.timers import seconds
from clap_ds.model.htsat import SpecAugment
from clap_ds.run_records.environment import device_name
from clap_ds.utils.errors import run_alone

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
COLUMNS = (
    "clips {clips} | masked {way} | copies {copies} | GB copied {gb:.3f} | ms per clip {ms:.2f}"
)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "in a loop": mask_in_a_loop,
    "once": lambda normed_BFT1: SpecAugment()(normed_BFT1.squeeze(-1)).unsqueeze(-1),
}


class CopyCount(TorchDispatchMode):
    """Count copies of tensors with at least this many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func in COPIES and args[0].nbytes >= self.nbytes
        return func(*args, **(kwargs or {}))


def compare(clips: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each way: copies of the batch's gradient in the backward pass, read and
    written, and the time of forward and backward pass from the batch norm on. Clips are 10 s, as in
    LAION's models."""
    norm = nn.BatchNorm2d(64, device=device)
    mel = torch.randn(clips, 64, 1001, 1, device=device)
    passes = {
        way: lambda mask=mask: mask(norm(mel)).square().sum().backward()
        for way, mask in WAYS.items()
    }
    times = [{way: seconds(run, device) for way, run in passes.items()} for _ in range(rounds)]
    rows = []
    for way, run in passes.items():
        with CopyCount(mel.nbytes) as count:
            run()
        ms = 1000 * median(each[way] for each in times) / clips
        rows.append(
            {
                "clips": clips,
                "way": way,
                "copies": count.copies,
                "gb": 2 * count.copies * mel.nbytes / 1e9,
                "ms": ms,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--clips", type=int, nargs="+", default=[4, 16, 64], help="batch sizes (default: 4 16 64)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed passes of each way, in turn (default: 5)"
    )
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [row for clips in options.clips for row in compare(clips, options.rounds, device)]
    title = f"# SpecAugment on {device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    show(options.output, f"{title}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
