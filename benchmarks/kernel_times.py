"""Command: the Triton kernels on this GPU, each against the least time that its traffic and
arithmetic need.

    python -m benchmarks.kernel_times [--clips 616] [--output FILE.md]

Each kernel runs in bf16 at every size of HTSAT-tiny and HTSAT-base, next to the operations that it
replaces. On a few clips its result and gradients are compared with these in fp32. Copy
bandwidth and the rate of a large product are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from benchmarks.common import make_parser, save, table
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model.gelu_linear_triton import (
    compute_activations,
    compute_gradients,
    usable_tiles,
)
from clap_ds.model.gelu_triton import gelu_backward, gelu_forward
from clap_ds.model.mlp_triton import supports, triton_mlp
from clap_ds.model.shifted_windows import shifted_window_mask
from clap_ds.model.text_attention import attend_in_one_kernel
from clap_ds.model.window_attention import attend_windows
from clap_ds.utils.errors import UserError, run_alone

COLUMNS = (
    "kernel {kernel} | size {size} | pass {pass} | ms {ms:.3f} | least ms {least_ms:.3f} | share {share:.0%}"
    " | torch, ms {torch_ms:.3f} | error {error:.1e} | torch's error {torch_error:.1e} | note {note}"
)
ITEM = 2  # bytes of a bf16
MATRIX = 8192  # rows and columns of the product that measures the rate
FEW = 4  # clips of a comparison
Function = Callable[..., Tensor]


class Case(NamedTuple):
    """A kernel at one size: `shapes` of its inputs, the first with clips in front; bytes moved and
    FLOPs of both passes."""

    kernel: str
    size: str
    ours: Function | None
    torchs: Function
    shapes: Sequence[tuple[int, ...]]
    moved: tuple[float, float]
    flops: tuple[float, float]


def attention_cases(audio: AudioConfig, clips: int) -> Iterator[Case]:
    for grid, heads, dim in zip(audio.stage_grids, audio.num_heads, audio.stage_dims, strict=True):
        # The last stage is one window.
        window = min(audio.attention_window, grid)
        # Every second block shifts its windows.
        for shift in (0, window // 2) if grid > window else (0,):
            mask = shifted_window_mask(grid, window, shift) if shift else None
            geometry: dict[str, Any] = {"mask_GNN": mask, "window": window, "shift": shift}
            values = clips * grid**2 * dim * ITEM
            product = 2 * clips * grid**2 * window**2 * dim
            yield Case(
                kernel="attention",
                size=f"{grid}² × {dim}, {heads} heads, shift {shift}",
                ours=partial(attend_windows, **geometry, kernel="triton"),
                torchs=partial(attend_windows, **geometry, kernel="sdpa"),
                shapes=[(clips, grid, grid, 3 * dim), (heads, window**2, window**2)],
                # Forward: q, k, v and the output; backward: also their gradients.
                moved=(4 * values, 7 * values),
                # The backward pass computes twice the forward pass, and one product of it again.
                flops=(2 * product, 5 * product),
            )


def mlp_case(size: str, clips: int, tokens: int, dim: int, hidden: int) -> Case:
    """Return an MLP of one width: fused, or with one product of the backward pass in a kernel with
    GELU."""

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    is_fused = supports(dim, hidden)
    values = clips * tokens * ITEM
    product = 2 * clips * tokens * dim * hidden
    # Values that each token reads and writes, forward and backward.
    forward_values = 2 * dim
    backward_values = 5 * dim + 4 * hidden
    if not is_fused:
        forward_values = 2 * dim + 4 * hidden
        backward_values = 4 * dim + 5 * hidden
    return Case(
        kernel="mlp" if is_fused else "mlp, not fused",
        size=size,
        ours=triton_mlp,
        torchs=eager,
        shapes=[(clips, tokens, dim), (hidden, dim), (hidden,), (dim, hidden), (dim,)],
        moved=(values * forward_values, values * backward_values),
        # The fused kernel computes one product of the forward pass again.
        flops=(2 * product, (4 + is_fused) * product),
    )


def mlp_cases(audio: AudioConfig, clips: int) -> Iterator[Case]:
    for grid, dim in zip(audio.stage_grids, audio.stage_dims, strict=True):
        yield mlp_case(f"{grid}² × {dim}", clips, grid**2, dim, audio.mlp_ratio * dim)


def measure_product(tokens: int, channels: int, units: int) -> Iterator[dict[str, Any]]:
    """Yield a row per pass of a product with GELU: one kernel, beside torch's product and GELU's own
    kernel. The note names the faster way, and each tile's time."""
    input_TC, weight_CM, hidden_TM = (
        torch.randn(shape, dtype=torch.bfloat16)
        for shape in ((tokens, channels), (channels, units), (tokens, units))
    )
    weight_MC = weight_CM.T.contiguous()
    bias_M = weight_CM[0]
    passes = (
        ("forward", compute_activations, (input_TC, weight_MC, bias_M),
         lambda: gelu_forward(F.linear(input_TC, weight_MC, bias_M))),
        ("backward", compute_gradients, (input_TC, weight_CM, hidden_TM),
         lambda: gelu_backward(input_TC @ weight_CM, hidden_TM)),
    )  # fmt: skip
    for name, compute, inputs, separate in passes:
        row: dict[str, Any] = {
            "kernel": "product with GELU",
            "size": f"{tokens} × {channels} × {units}",
            "pass": name,
            # Hidden units are moved twice.
            "bytes": ITEM * (tokens * channels + channels * units + 2 * tokens * units),
            "flops": 2 * tokens * channels * units,
        }
        try:
            separate_ms = median_ms(separate)
            # By hidden units of a tile. A run takes the first one.
            times_ms = {
                2 * tile.units: round(median_ms(partial(compute, *inputs, tile)), 3)
                for tile in usable_tiles(channels, input_TC.device)
            }
            row |= {"ms": next(iter(times_ms.values())), "torch_ms": separate_ms}
            faster = "one kernel" if row["ms"] < separate_ms else "two kernels"
            row["note"] = f"{faster} faster; {times_ms}"
        except Exception as error:
            row["note"] = describe_failure(error)
        yield row


def text_cases(clips: int) -> Iterator[Case]:
    """Yield the text tower's MLP, and its attention over 77 tokens with Triton's and torch's
    kernel."""
    yield mlp_case("77 × 768", clips, 77, 768, 3072)
    heads = 12
    tokens = 77
    dim = 64

    def ours(qkv: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
        return attend_in_one_kernel(qkv, bias, None, None, heads, dropout)

    def torchs(qkv: Tensor, bias: Tensor) -> Tensor:
        # The bias has a gradient, and adds nothing.
        q, k, v = (qkv + bias - bias.detach()).unflatten(2, (3, heads, dim)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    values = clips * heads * tokens * dim * ITEM
    product = 2 * clips * heads * tokens**2 * dim
    case = Case(
        kernel="text attention",
        size=f"{tokens} × {heads * dim}",
        ours=ours,
        torchs=torchs,
        shapes=[(clips, tokens, 3 * heads * dim), (3 * heads * dim,)],
        moved=(4.0 * values, 7.0 * values),
        flops=(2 * product, 5 * product),
    )
    yield case
    # Masks differ from torch's, so only the time is of interest.
    dropout = partial(ours, dropout=0.1)
    yield case._replace(kernel="text attention, dropout 0.1", ours=None, torchs=dropout)


def median_ms(function: Callable[[], object], warmup: int = 10, rep: int = 60) -> float:
    return float(do_bench(function, warmup=warmup, rep=rep, return_mode="median"))


def peaks() -> tuple[float, float]:
    """Return bytes per second of a large copy (read and written) and FLOP/s of a large bf16
    product."""
    # Larger than any cache.
    source = torch.empty(2**31, dtype=torch.uint8)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    # Random, because constant data draws less power and runs faster; long, for clocks to settle.
    a, b = (torch.randn(MATRIX, MATRIX).bfloat16() for _ in range(2))
    return bandwidth, 2 * MATRIX**3 / median_ms(lambda: a @ b, 1000, 2000) * 1e3


def passes(
    function: Function, inputs: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Callable[[], Any], ...]:
    """Return a function's forward and backward pass, with gradients of ones, as calls without
    arguments."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    output = function(*leaves)
    # Gradients of the output.
    ones = torch.ones_like(output)

    def backward() -> Any:
        return torch.autograd.grad(output, leaves, ones, retain_graph=True)

    return partial(function, *leaves), backward


def compute(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients in fp32."""
    forward, backward = passes(function, inputs, dtype)
    return [tensor.detach().float() for tensor in (forward(), *backward())]


def measure_errors(case: Case, inputs: list[Tensor]) -> dict[str, float]:
    """Return the largest relative error of output and gradients in bf16, of a kernel and of torch,
    against torch in fp32."""
    # Weights stay whole.
    inputs = [inputs[0][:FEW], *inputs[1:]]
    # torch in fp32 is the reference of both.
    expected = compute(case.torchs, inputs, torch.float32)
    errors = {}
    for name, function in (("error", case.ours), ("torch_error", case.torchs)):
        results = compute(function or case.torchs, inputs, torch.bfloat16)
        pairs = zip(results, expected, strict=True)
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return errors


def describe_failure(error: Exception) -> str:
    """Return an error's first line for a cell of the table."""
    return (str(error) or type(error).__name__).splitlines()[0].replace("|", "/")[:120]


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the table's rows of both passes. A failure is a row, so that other kernels still
    run."""
    rows: list[dict[str, Any]] = [
        {"kernel": case.kernel, "size": case.size, "pass": name} for name in ("forward", "backward")
    ]
    try:
        # Small, as activations and weights are.
        inputs = [0.1 * torch.randn(shape, dtype=torch.bfloat16) for shape in case.shapes]
        errors = measure_errors(case, inputs) if case.ours else {}
        for name, function in (("torch_ms", case.torchs), ("ms", case.ours or case.torchs)):
            for row, call in zip(rows, passes(function, inputs, torch.bfloat16), strict=True):
                row |= {name: median_ms(call), **errors}
    except Exception as error:
        for row in rows:
            row["note"] = describe_failure(error)
    for row, moved, flops in zip(rows, case.moved, case.flops, strict=True):
        yield {**row, "bytes": moved, "flops": flops}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    clips_help = "clips of HTSAT-tiny's micro-batch (default: 616)"
    parser.add_argument("--clips", type=int, default=616, help=clips_help)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: torch.cuda.is_available() is false")
    torch.set_default_device("cuda")
    bandwidth, rate = peaks()
    rows = list[dict[str, Any]]()
    cases = list[Case]()
    # The text tower's MLP, which takes the most time of both models' products.
    sizes = [(options.clips * 77, 768, 3072)]
    # HTSAT-base's published micro-batch is 416, of 616.
    for preset, clips in (("htsat_tiny", options.clips), ("htsat_base", options.clips * 2 // 3)):
        audio = load_preset(f"{preset}_roberta_base").audio
        cases += [*attention_cases(audio, clips), *mlp_cases(audio, clips)]
        for grid, dim in zip(audio.stage_grids, audio.stage_dims, strict=True):
            if not supports(dim, audio.mlp_ratio * dim):
                sizes.append((clips * grid**2, dim, audio.mlp_ratio * dim))
    cases += text_cases(options.clips)
    measurements = [partial(measure_product, *size) for size in sizes]
    measurements += [partial(measure, case) for case in cases]
    device = torch.cuda.get_device_name()
    title = f"# {device}: copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s"
    print(title, table(COLUMNS, []), sep="\n\n", flush=True)
    for measurement in measurements:
        for row in measurement():
            # Limited by traffic or by arithmetic.
            row["least_ms"] = 1000 * max(row["bytes"] / bandwidth, row["flops"] / rate)
            if "ms" in row:
                row["share"] = row["least_ms"] / row["ms"]
            rows.append(row)
            print(table(COLUMNS, [row]).splitlines()[-1], flush=True)
        # After every measurement, because the command may be ended at any time.
        figures = {"device": device, "bandwidth": bandwidth, "flops_per_s": rate, "rows": rows}
        save(options.output, f"{title}\n\n{table(COLUMNS, rows)}", figures)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_alone(main)
