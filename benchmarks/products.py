"""Command: how quickly this CPU does the matrix products of a training step, by oneDNN and by this project's kernels.

    python -m benchmarks.products [--preset …] [--micro_batches 4 8 64] [--output results/cpu/products/NAME.md]

For each linear layer of a step its three products in bf16: output, gradient of the input and of the weight, each by either in
turns; the table has GFLOPS by the quickest run of each. From the quicker of the two at every shape follows the least time a
step can take (`limit_s`): all of its FLOPs at that rate, and what AdamW reads and writes at the speed of memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import choose_device, make_parser, show, table
from benchmarks.sides import add_model_options, make_batch, our_model, softmax_loss
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel
from clap_ds.native import linear
from clap_ds.native.convert import report, reverted
from clap_ds.native.library import unavailable
from clap_ds.planning.trace import trace
from clap_ds.record.clock import seconds
from clap_ds.record.hardware import device_name

BYTES_OF_ADAMW = 6 * 4 + 2 * 2
"""Of a parameter: fp32 master and two moments read and written, bf16 gradient read, bf16 weight written."""
DIRECTIONS = ("output", "dinput", "dweight")
COLUMNS = "rows {rows} | inputs {inputs} | outputs {outputs} | in a step {count}" + "".join(
    f" | {name}, oneDNN {{{name}_onednn:.0f}} | {name}, ours {{{name}_ours:.0f}} | {name}, × {{{name}_ratio:.2f}}"
    for name in DIRECTIONS
)
Shape = tuple[int, int, int]
"""Rows, inputs and outputs of a linear layer."""


def linears_of(model: ClapModel, batch: Batch) -> tuple[Counter[Shape], int]:
    """The linear layers that a step of the model runs, and the FLOPs of all its products, by torch's operations."""
    with reverted(model), trace() as recorded:
        softmax_loss(*model(*batch.model_inputs())).backward()
    model.zero_grad(set_to_none=True)
    shapes: Counter[Shape] = Counter()
    for operation in recorded.operations:
        if operation.name in ("aten.mm", "aten.addmm") and not operation.backward:
            (rows, inputs), (_, outputs) = operation.shapes[-3:-1]
            shapes[rows, inputs, outputs] += 1
    return shapes, recorded.total("flops")


def time_linear(shape: Shape, seconds_each: float) -> dict[str, dict[str, float]]:
    """Seconds of each product, the quickest of turns that go on for `seconds_each` a product and implementation."""
    rows, inputs, outputs = shape
    x, dy = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    actions: dict[tuple[str, str], Callable[[], Any]] = {
        ("output", "onednn"): lambda: F.linear(x, weight, bias),
        ("dinput", "onednn"): lambda: dy @ weight,
        ("dweight", "onednn"): lambda: dy.t() @ x,
    }
    if not (unavailable() or inputs % linear.BLOCK or outputs % linear.BLOCK):
        actions["output", "ours"] = lambda: linear._forward(x, [weight], [bias], None)
        actions["dinput", "ours"] = lambda: linear._backward_input(dy, [weight], None)
        actions["dweight", "ours"] = lambda: linear._backward_weights(dy, x, [weight], with_bias=False)
    best = dict.fromkeys(actions, float("inf"))
    until, number = time.perf_counter() + seconds_each * len(actions), 0
    while number < 3 or time.perf_counter() < until:
        for name, action in actions.items():
            best[name] = min(best[name], seconds(action, x.device))
        number += 1
    return {way: {d: best[d, way] for d in DIRECTIONS} for way in ("onednn", "ours") if (DIRECTIONS[0], way) in best}


def memory_rate(num_floats: int = 2**26) -> float:
    """Bytes per second that a sum of two fp32 tensors reads and writes, the quickest of ten."""
    a, b = torch.ones(num_floats), torch.ones(num_floats)
    return 3 * a.nbytes / min(seconds(lambda: a.add_(b), a.device) for _ in range(10))


def limit_s(model: ClapModel, batch: Batch, seconds_each: float = 0.05) -> dict[str, float]:
    """Least seconds of a step of a bf16 model on this CPU, and the rates they follow from."""
    shapes, flops = linears_of(model, batch)
    times = {shape: time_linear(shape, seconds_each) for shape in shapes}
    quickest = {shape: sum(min(way[d] for way in ways.values()) for d in DIRECTIONS) for shape, ways in times.items()}
    linear_flops = sum(6 * rows * inputs * outputs * n for (rows, inputs, outputs), n in shapes.items())
    rate = linear_flops / sum(n * quickest[shape] for shape, n in shapes.items())
    moved, bytes_per_s = BYTES_OF_ADAMW * sum(p.numel() for p in model.parameters() if p.requires_grad), memory_rate()
    found = {"flops": flops, "product_flops_per_s": rate, "memory_bytes_per_s": bytes_per_s}
    return found | {
        "products_s": flops / rate,
        "adamw_s": moved / bytes_per_s,
        "limit_s": flops / rate + moved / bytes_per_s,
    }


def _row(shape: Shape, count: int, ways: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    rows, inputs, outputs = shape
    row: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs, "count": count}
    for way, times in ways.items():
        row |= {f"{name}_{way}": 2e-9 * rows * inputs * outputs / value for name, value in times.items()}
    if len(ways) == 2:
        row |= {f"{name}_ratio": row[f"{name}_ours"] / row[f"{name}_onednn"] for name in DIRECTIONS}
    return row


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("products", __doc__)
    add_model_options(parser)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[8], metavar="N")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each product and implementation")
    arguments = parser.parse_args(argv)
    choose_device()
    device, config = torch.device("cpu"), load_preset(arguments.preset)
    model = our_model(config, device, low="cast").train()
    parts, results = [], {}
    for micro_batch in arguments.micro_batches:
        batch = make_batch(arguments, config, device, micro_batch)
        shapes, _ = linears_of(model, batch)
        rows = [_row(shape, count, time_linear(shape, arguments.seconds)) for shape, count in sorted(shapes.items())]
        parts.append(f"## Micro-batch {micro_batch}: GFLOPS\n\n{table(COLUMNS, rows)}")
        results[micro_batch] = rows
    text = (
        f"# Products of a step: {config.title} on {device_name(device)}\n\n{torch.get_num_threads()} threads,"
        f" {arguments.text_tokens} text tokens ({arguments.text}), bf16; kernels: {report('auto')}; torch {torch.__version__}."
    )
    show(arguments.output, "\n\n".join([text, *parts]), results)


if __name__ == "__main__":
    run_alone(main)
