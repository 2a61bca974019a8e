"""Time the Triton kernels on this GPU against a roofline: the minimum time of their memory traffic and arithmetic.

    python -m benchmarks.kernel_times [--clips 616] [--output FILE.md]

The roofline uses measured copy bandwidth and matrix-product throughput. Each kernel runs in bf16 at every size of HTSAT-tiny
and HTSAT-base. Its result is compared with eager fp32 on four clips, its time with the torch operations that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
ITEM = 2  # bytes per bf16 value


def median_ms(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))


def peaks() -> tuple[float, float]:
    """Measure bytes per second of a large copy (read and written) and FLOP/s of a large bf16 product."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return bandwidth, 2 * 8192**3 / median_ms(lambda: a @ b) * 1e3


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def timed(name: str, shape: str, run: Callable[[], Any], size: tuple[float, float], **more: Any) -> dict[str, Any]:
    """Time `run` and return a table row. `size`: bytes moved and FLOPs."""
    row: dict[str, Any] = {"kernel": name, "shape": shape, "bytes": size[0], "flop": size[1], **more}
    try:
        row["ms"] = median_ms(run)
    except Exception as error:  # record the failure and continue with other kernels
        row["note"] = (str(error) or type(error).__name__).splitlines()[0].replace("|", "/")[:120]
    return row


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], d_output: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    leaves = [each.detach().to(dtype).requires_grad_() for each in inputs]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, d_output.to(dtype))]


def errors(ours: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Return the largest relative errors (outputs, gradients) against fp32 of a kernel and of eager code, in bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = [each.bfloat16().float() for each in inputs]
    d_output = torch.randn_like(eager(*inputs)).bfloat16()
    expected = gradients(eager, inputs, d_output, torch.float32)
    found = {}
    for name, function in (("error", ours), ("torch_error", eager)):
        got = gradients(function, inputs, d_output, torch.bfloat16)
        found[name] = max(error_of(a, b) for a, b in zip(got, expected, strict=True))
    return found


def attention_rows(audio: AudioConfig, clips: int) -> Iterator[dict[str, Any]]:
    for stage, (grid, heads, dim) in enumerate(zip(audio.stage_grids, audio.num_heads, audio.stage_dims, strict=True)):
        window = min(audio.attention_window, grid)
        for shift in (0, window // 2) if grid > window else (0,):
            mask = shifted_window_mask(grid, window, shift).cuda() if shift else None

            def by(kernel: Any, w: int = window, s: int = shift, m: Tensor | None = mask) -> Callable[..., Tensor]:
                return lambda qkv, bias: attend_windows(qkv, bias, m, w, s, kernel)

            shape = f"{grid}² × {dim}, {heads} heads, shift {shift}"
            bias = torch.randn(heads, window**2, window**2, device="cuda")
            found = errors(by("triton"), by("sdpa"), [torch.randn(4, grid, grid, 3 * dim, device="cuda"), bias])
            qkv = torch.randn(clips, grid, grid, 3 * dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
            bias = bias.bfloat16().requires_grad_()
            tokens, d_output = clips * grid**2, torch.randn(clips, grid, grid, dim, device="cuda", dtype=torch.bfloat16)
            product = 2.0 * tokens * window**2 * dim
            for way in ("forward", "backward"):
                size = (
                    (4.0 if way == "forward" else 7.0) * tokens * dim * ITEM,
                    (2 if way == "forward" else 5) * product,
                )
                row: dict[str, Any] = {}
                for kernel in ("sdpa", "triton"):
                    output = by(kernel)(qkv, bias)

                    def run(output: Tensor = output, kernel: str = kernel, way: str = way) -> object:
                        if way == "forward":
                            return by(kernel)(qkv, bias)
                        return torch.autograd.grad(output, (qkv, bias), d_output, retain_graph=True)

                    before = {"torch_ms": row["ms"]} if "ms" in row else {}
                    row = timed(f"attention {way}", f"stage {stage}: {shape}", run, size, **before, **found)
                yield row


def mlp_rows(audio: AudioConfig, clips: int) -> Iterator[dict[str, Any]]:
    from clap_ds.model.mlp_triton import supports, triton_mlp

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    compiled = torch.compile(eager)
    for grid, dim in zip(audio.stage_grids, audio.stage_dims, strict=True):
        hidden = audio.mlp_ratio * dim
        tokens = clips * grid**2
        weights = [torch.randn(*s, device="cuda") * 0.05 for s in ((hidden, dim), (hidden,), (dim, hidden), (dim,))]
        low = [each.bfloat16().requires_grad_() for each in weights]
        x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        d_output = torch.randn_like(x)
        product = 2.0 * tokens * dim * hidden
        kinds = {"torch": compiled, **({"triton": triton_mlp} if supports(dim, hidden) else {})}
        found = (
            errors(triton_mlp, eager, [torch.randn(4096, dim, device="cuda"), *weights]) if "triton" in kinds else {}
        )
        for way in ("forward", "backward"):
            size = (
                (2.0 * tokens * dim * ITEM, 2 * product)
                if way == "forward"
                else ((5.0 * dim + 4.0 * hidden) * tokens * ITEM, 5 * product)
            )
            row: dict[str, Any] = {}
            for kind, function in kinds.items():
                output = function(x, *low)

                def run(output: Tensor = output, function: Any = function, way: str = way) -> object:
                    if way == "forward":
                        return function(x, *low)
                    return torch.autograd.grad(output, (x, *low), d_output, retain_graph=True)

                before = {"torch_ms": row["ms"]} if "ms" in row else {}
                row = timed(f"mlp {way} by {kind}", f"{grid}² × {dim}", run, size, **before, **found)
            yield row


def thin_rows(audio: AudioConfig, clips: int) -> Iterator[dict[str, Any]]:
    """Time weight gradients and forward products of the narrow linears over all tokens with torch."""
    for grid, dim in list(zip(audio.stage_grids, audio.stage_dims, strict=True))[:3]:
        tokens = clips * grid**2
        for name, rows, columns in (
            ("qkv", 3 * dim, dim),
            ("proj", dim, dim),
            ("fc1", 4 * dim, dim),
            ("fc2", dim, 4 * dim),
        ):
            dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            size = float(tokens * (rows + columns) * ITEM), 2.0 * tokens * rows * columns
            yield timed(
                "weight gradient", f"{name}: {tokens:,} × {rows} × {columns}", lambda dy=dy, x=x: dy.T @ x, size
            )
            weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            yield timed(
                "forward product", f"{name}: {tokens:,} × {columns} × {rows}", lambda w=weight, x=x: x @ w.T, size
            )


def text_rows(clips: int) -> Iterator[dict[str, Any]]:
    """Time the text tower's attention over 77 tokens with each torch backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, length, dim = 12, 77, 64
    shape = (clips, length, heads, dim)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    d_output = torch.randn_like(q)
    moved, product = q.nbytes, 2.0 * clips * heads * length**2 * dim
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        for dropout in (0.0, 0.1):
            name = f"text attention, {backend.name.split('_')[0].lower()}, dropout {dropout}"

            def forward(backend: Any = backend, dropout: float = dropout) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

            yield timed(name, f"{shape} forward", forward, (4.0 * moved, 2 * product))
            try:
                output = forward()
            except RuntimeError:
                continue

            def backward(output: Tensor = output) -> object:
                return torch.autograd.grad(output, (q, k, v), d_output, retain_graph=True)

            yield timed(name, f"{shape} backward", backward, (8.0 * moved, 5 * product))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("kernel_times", __doc__)
    parser.add_argument("--clips", type=int, default=616, help="micro-batch size in clips (default: 616)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: torch.cuda.is_available() is False")
    bandwidth, rate = peaks()
    rows = list[dict[str, Any]]()
    for preset in PRESETS:
        audio = load_preset(f"{preset}_roberta_base").audio
        for kind in (attention_rows, mlp_rows, thin_rows):
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
