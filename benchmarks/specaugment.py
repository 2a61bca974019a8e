"""Measure what SpecAugment's writes clip by clip cost in a training step, beside one mask of the batch.

    python -m benchmarks.specaugment [--clips 4 16 64] [--output FILE.md]

open_clip and LAION-CLAP mask the output of a trained batch norm in place, on views, stripe by stripe. In the backward pass each
write copies the gradient of the whole batch: 4 B + 1 copies for B clips. One multiplication by a mask needs none.
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
from clap_ds.config.errors import run_alone
from clap_ds.model.htsat import SpecAugment
from clap_ds.run_records.environment import device_name
from clap_ds.run_records.timers import seconds

FRAMES, BINS = 1001, 64  # of 10 s in LAION's models
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
COLUMNS = (
    "clips {clips} | copies, loop {loop[copies]} | copies, mask {mask[copies]} | GB copied, loop {loop[gb]:.2f}"
    " | ms per clip, loop {loop[ms]:.2f} | ms per clip, mask {mask[ms]:.2f} | ratio {ratio:.1f}"
)


class CopyCount(TorchDispatchMode):
    """Count copies of tensors that have at least this many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.copies = elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func in COPIES and args[0].numel() >= self.elements
        return func(*args, **(kwargs or {}))


def one_mask(normed_BFT1: Tensor) -> Tensor:
    return SpecAugment()(normed_BFT1.squeeze(-1)).unsqueeze(-1)


def compare(clips: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return a row: for each way, copies of the batch's gradient, their bytes (read and written), and forward and backward time
    from the batch norm on."""
    norm, mel = nn.BatchNorm2d(BINS, device=device), torch.randn(clips, BINS, FRAMES, 1, device=device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"loop": mask_in_a_loop, "mask": one_mask}
    row: dict[str, Any] = {"clips": clips}
    for name, mask in ways.items():
        loss = mask(norm(mel)).square().sum()
        with CopyCount(mel.numel()) as count:
            loss.backward()
        row[name] = {"copies": count.copies, "gb": 2 * count.copies * mel.nbytes / 1e9}
    passes = {name: lambda mask=mask: mask(norm(mel)).square().sum().backward() for name, mask in ways.items()}
    times = [{name: seconds(run, device) for name, run in passes.items()} for _ in range(rounds)]
    for name in ways:
        row[name]["ms"] = 1000 * median(each[name] for each in times) / clips
    return {**row, "ratio": row["loop"]["ms"] / row["mask"]["ms"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("specaugment", __doc__)
    parser.add_argument("--clips", type=int, nargs="+", default=[4, 16, 64], help="batch sizes (default: 4 16 64)")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each, in turn (default: 5)")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [compare(clips, arguments.rounds, device) for clips in arguments.clips]
    title = f"# SpecAugment on {device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    show(arguments.output, f"{title}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
