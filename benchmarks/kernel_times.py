"""Command: the Triton kernels on this GPU, each against the least time its traffic and arithmetic need.

    python -m benchmarks.kernel_times [--clips 616] [--output FILE.md]

Copy bandwidth and matrix-product throughput are measured first and define the least times. Each kernel runs at every size
of HTSAT-tiny and HTSAT-base, in bf16. Its result is compared with the eager form in fp32 on four clips, and its time with
that of the torch operations that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model.window_attention import attend_windows
from clap_ds.model.windows import shifted_window_mask

PRESETS = ("htsat_tiny", "htsat_base")
COLUMNS = (
    "kernel {kernel} | shape {shape} | ms {ms:.3f} | least ms {least_ms:.3f} | share {share:.0%} | torch, ms {torch_ms:.3f}"
    " | error {error:.1e} | torch's error {torch_error:.1e} | note {note}"
)
ITEM = 2  # bytes of a bf16
MATRIX = 8192  # rows and columns of the product that measures the peak
Row = dict[str, Any]
Size = tuple[float, float]


def median_ms(function: Callable[[], object], warmup: int = 10, rep: int = 60) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=warmup, rep=rep, return_mode="median"))


def peaks() -> tuple[float, float]:
    """Return bytes per second of a large copy (read and written) and FLOP/s of a large bf16 product."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    # Random, because constant data draws less power and runs faster; long, for clocks to settle.
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return bandwidth, 2 * MATRIX**3 / median_ms(lambda: torch.matmul(a, b, out=product), 1000, 2000) * 1e3


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def timed(name: str, shape: str, run: Callable[[], Any], size: Size, **more: Any) -> Row:
    """Return a table row. `size`: bytes moved and FLOPs."""
    row: Row = {"kernel": name, "shape": shape, "bytes": size[0], "flop": size[1], **more}
    try:
        row["ms"] = median_ms(run)
    except Exception as error:  # a kernel's failure is a row, so that the others still run
        row["note"] = (str(error) or type(error).__name__).splitlines()[0].replace("|", "/")[:120]
    return row


Function = Callable[..., Tensor]


def ways(function: Function, leaves: Sequence[Tensor], d_output: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a function's forward and backward pass as calls without arguments."""
    output = function(*leaves)
    return {
        "forward": lambda: function(*leaves),
        "backward": lambda: torch.autograd.grad(output, leaves, d_output, retain_graph=True),
    }


def errors(ours: Function, eager: Function, inputs: Sequence[Tensor]) -> dict[str, float]:
    """Return the largest relative error in bf16 of a kernel and of the eager form, output and gradients, against fp32."""
    inputs = [each.bfloat16().float() for each in inputs]
    d_output = torch.randn_like(eager(*inputs)).bfloat16()

    def results(function: Function, dtype: torch.dtype) -> list[Tensor]:
        found = ways(function, [each.to(dtype).requires_grad_() for each in inputs], d_output.to(dtype))
        return [found["forward"](), *found["backward"]()]

    expected = results(eager, torch.float32)
    sides = {"error": results(ours, torch.bfloat16), "torch_error": results(eager, torch.bfloat16)}
    return {name: max(map(error_of, found, expected)) for name, found in sides.items()}


def compared(name: str, shape: str, sizes: Mapping[str, Size], torchs: Any, ours: Any, **more: Any) -> Iterator[Row]:
    """Yield a row for each way of a kernel, with its time and torch's; `ours` is None if only torch has it."""
    for way, size in sizes.items():
        row = timed(f"{name} {way}", shape, torchs[way], size, **more)
        yield row if ours is None else timed(f"{name} {way}", shape, ours[way], size, torch_ms=row.get("ms"), **more)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def attention_rows(audio: AudioConfig, clips: int) -> Iterator[Row]:
    for grid, heads, dim in zip(audio.stage_grids, audio.num_heads, audio.stage_dims, strict=True):
        window = min(audio.attention_window, grid)
        for shift in (0, window // 2) if grid > window else (0,):
            mask = shifted_window_mask(grid, window, shift).cuda() if shift else None
            geometry: dict[str, Any] = {"mask_GNN": mask, "window": window, "shift": shift}
            sdpa, triton = (partial(attend_windows, **geometry, kernel=kernel) for kernel in ("sdpa", "triton"))
            qkv, bias, d_output = (
                noise(clips, grid, grid, 3 * dim),
                noise(heads, window**2, window**2),
                noise(clips, grid, grid, dim),
            )
            tokens, product = clips * grid**2, 2.0 * clips * grid**2 * window**2 * dim
            sizes = {
                "forward": (4.0 * tokens * dim * ITEM, 2 * product),
                "backward": (7.0 * tokens * dim * ITEM, 5 * product),
            }
            found = errors(triton, sdpa, [qkv[:4].detach(), bias.detach()])
            both = [ways(kernel, (qkv, bias), d_output) for kernel in (sdpa, triton)]
            shape = f"{grid}² × {dim}, {heads} heads, shift {shift}"
            yield from compared("attention", shape, sizes, *both, **found)


def mlp_rows(audio: AudioConfig, clips: int) -> Iterator[Row]:
    from clap_ds.model.mlp_triton import supports, triton_mlp

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    torch._functorch.config.donated_buffer = False  # the timed backward pass runs again and again
    compiled = torch.compile(eager)
    for grid, dim in zip(audio.stage_grids, audio.stage_dims, strict=True):
        hidden, tokens = audio.mlp_ratio * dim, clips * grid**2
        shapes = ((hidden, dim), (hidden,), (dim, hidden), (dim,))
        leaves = [noise(tokens, dim), *((0.05 * noise(*shape)).detach().requires_grad_() for shape in shapes)]
        product, d_output = 2.0 * tokens * dim * hidden, noise(tokens, dim)
        backward = (5.0 * dim + 4.0 * hidden) * tokens * ITEM, 5 * product
        sizes = {"forward": (2.0 * tokens * dim * ITEM, 2 * product), "backward": backward}
        ours, found = None, dict[str, float]()
        if supports(dim, hidden):
            ours = ways(triton_mlp, leaves, d_output)
            found = errors(triton_mlp, eager, [leaves[0][:4096].detach(), *(each.detach() for each in leaves[1:])])
        yield from compared("mlp", f"{grid}² × {dim}", sizes, ways(compiled, leaves, d_output), ours, **found)


def text_rows(clips: int) -> Iterator[Row]:
    """Time the text tower's attention over 77 tokens with each of torch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, length, dim = 12, 77, 64
    leaves = [noise(clips, length, heads, dim).transpose(1, 2) for _ in range(3)]
    d_output = torch.randn_like(leaves[0])
    product = 2.0 * clips * heads * length**2 * dim
    sizes = {"forward": (4.0 * d_output.nbytes, 2 * product), "backward": (8.0 * d_output.nbytes, 5 * product)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for dropout in (0.0, 0.1):
            with sdpa_kernel(backend):
                passes = ways(partial(F.scaled_dot_product_attention, dropout_p=dropout), leaves, d_output)
                name = f"text attention, {backend.name.split('_')[0].lower()}, dropout {dropout}"
                yield from compared(name, f"{clips} × {heads} × {length} × {dim}", sizes, passes, None)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("kernel_times", __doc__)
    parser.add_argument("--clips", type=int, default=616, help="clips of a micro-batch; default 616")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: torch.cuda.is_available() is false")
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth, rate = peaks()
    rows = list[Row]()
    for preset in PRESETS:
        audio = load_preset(f"{preset}_roberta_base").audio
        for kind in (attention_rows, mlp_rows):
            for row in kind(audio, options.clips if preset == "htsat_tiny" else options.clips * 2 // 3):
                rows.append({"preset": preset, **row})
            torch.cuda.empty_cache()
    rows += text_rows(options.clips)
    for row in rows:
        row["least_ms"] = 1000 * max(row["bytes"] / bandwidth, row["flop"] / rate)
        row |= {"share": row["least_ms"] / row["ms"]} if "ms" in row else {}
    title = (
        f"# {torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s"
    )
    show(
        options.output, f"{title}\n\n{table(COLUMNS, rows)}", {"bandwidth": bandwidth, "flop_per_s": rate, "rows": rows}
    )


if __name__ == "__main__":
    run_alone(main)
