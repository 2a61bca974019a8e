"""Compare kernels of attention and MLPs with plain operations in fp64. As a command, check Triton's
with its interpreter.

    TRITON_INTERPRET=1 python tests/model/kernel_cases.py

The interpreter must be selected before Triton is imported, so these cases need a separate process.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.packed import Packing, compute_layout
from clap_ds.model.shifted_windows import shifted_window_mask
from clap_ds.model.swin import Mlp, WindowAttention
from clap_ds.model.text import SelfAttention
from clap_ds.model.window_attention import attend_windows

Compute = Callable[..., Tensor]


class Case(NamedTuple):
    """Window attention of one size; windows have 8×8 tokens."""

    grid: int
    heads: int
    dim: int
    shift: int


# Heads of tiny (24 channels), shifted; one window and heads of base (32); an odd number of windows,
# another shift and heads narrower than a block.
CASES = [Case(16, 2, 24, 4), Case(8, 2, 32, 0), Case(24, 1, 8, 3)]
# Tokens and channels: partial blocks of tokens, full ones, and a width without a kernel's product;
# in 16 bits a width whose product backward has a kernel.
MLP_CASES = [(200, 48), (128, 96), (132, 36), (134, 192)]
# Tokens, channels and hidden units: one token, a full block, and more.
GELU_LINEAR_CASES = [(1, 64, 256), (128, 128, 512), (231, 192, 256)]
# Tokens of captions, with padding to 24 tokens or without.
LENGTHS = (24, 3, 17, 1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.003}
"""Relative to the largest value: a few roundings of the dtype, in other places than the exact
form's."""


def draw_tensors(
    seed: int, shapes: Sequence[Sequence[int]], scales: Sequence[float] = ()
) -> list[Tensor]:
    """Draw normal bf16 tensors, by convention the inputs and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    scales = scales or [1.0] * len(shapes)
    return [
        torch.randn(*shape, generator=generator).bfloat16() * scale
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def mask_of(case: Case, device: torch.device) -> Tensor | None:
    return shifted_window_mask(case.grid, 8, case.shift).to(device) if case.shift else None


def by(kernel: str, case: Case) -> Compute:
    """Return the model's attention of q, k, v and bias with this kernel. `sdpa`, which
    `test_clap.py` compares with transformers, is the reference of the others."""

    def attend(*qkv_and_bias: Tensor) -> Tensor:
        *qkv, bias = qkv_and_bias
        mask = mask_of(case, bias.device)
        return attend_windows(torch.cat(qkv, dim=3), bias, mask, 8, case.shift, kernel)

    return attend


def draw(case: Case, clips: int = 3, spread: float = 1.0) -> list[Tensor]:
    """Draw q, k, v, bias and the output's gradient."""
    tokens = (clips, case.grid, case.grid, case.heads * case.dim)
    shapes = [tokens, tokens, tokens, (case.heads, 64, 64), tokens]
    return draw_tensors(sum(case), shapes, [spread, spread, spread, 1.0, 1.0])


def results(
    compute: Compute, inputs: Sequence[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return output and gradients in fp64; the last input is the output's gradient."""
    *leaves, probe = (tensor.detach().clone().to(device, dtype) for tensor in inputs)
    output = compute(*(leaf.requires_grad_() for leaf in leaves))
    gradients = torch.autograd.grad(output, leaves, probe.to(output.dtype))
    return [tensor.detach().double().cpu() for tensor in (output, *gradients)]


def errors(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest difference of each tensor relative to its largest value."""
    pairs = zip(tensors, expected, strict=True)
    return [float((tensor - exact).abs().max() / exact.abs().max()) for tensor, exact in pairs]


def largest_error(
    compute: Compute, exact: Compute, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> float:
    """Return the largest relative error of output and gradients, compared with `exact` in fp64."""
    expected = results(exact, inputs, torch.float64)
    return max(errors(results(compute, inputs, dtype, device), expected))


class Comparison(NamedTuple):
    """A computation with Triton's kernels, its plain form, and inputs for both."""

    name: str
    compute: Compute
    exact: Compute
    inputs: list[Tensor]


def compare_kernels(
    name: str,
    build: Callable[[], Any],
    tokens: Sequence[int],
    arguments: Callable[[torch.device], tuple[Any, ...]] = lambda device: (),
) -> Comparison:
    """Compare a module's kernels as functions of tokens of this shape and of the parameters.

    Args:
        arguments: makes the forward pass's other arguments.
    """

    def with_kernel(kernel: str) -> Compute:
        torch.manual_seed(0)
        module = build()
        module.kernel = kernel

        def compute(tokens: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip(names, parameters, strict=True))
            return functional_call(module.to(tokens), named, (tokens, *arguments(tokens.device)))

        return compute

    # Softmax doesn't depend on the keys' bias, whose gradient is only rounding errors.
    parameters = [item for item in build().named_parameters() if item[0] != "key.bias"]
    names = [name for name, _ in parameters]
    shapes = [tokens, *(parameter.shape for _, parameter in parameters), tokens]
    scales = [shape[1] ** -0.5 if len(shape) == 2 else 1.0 for shape in shapes]
    inputs = draw_tensors(sum(tokens), shapes, scales)
    # Not `torch`, which isn't a kernel of window attention.
    return Comparison(name, with_kernel("triton"), with_kernel("sdpa"), inputs)


def compare_windows(case: Case) -> Comparison:
    width = case.heads * case.dim
    return compare_kernels(
        str(case),
        lambda: WindowAttention(width, 8, case.heads),
        (2, case.grid, case.grid, width),
        lambda device: (mask_of(case, device), case.shift),
    )


def compare_mlp(num_tokens: int, dim: int) -> Comparison:
    name = f"MLP of {num_tokens} tokens, {dim} channels"
    return compare_kernels(name, lambda: Mlp(dim, 4), (2, num_tokens // 2, dim))


def mask_captions(device: torch.device) -> tuple[Tensor]:
    return (
        torch.arange(24, device=device) < torch.tensor(LENGTHS, device=device)[:, None, None, None],
    )


def lay_out_captions(device: torch.device) -> tuple[None, Any]:
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    return None, compute_layout(Packing(cu_seqlens, len(LENGTHS), max(LENGTHS)), sum(LENGTHS), 2)


def kernel_comparisons() -> list[Comparison]:
    """Return a comparison of each kernel at each size."""
    return [
        *map(compare_windows, CASES),
        *(compare_mlp(*size) for size in MLP_CASES),
        compare_kernels(
            "padded captions", lambda: SelfAttention(96, 3, 0.0), (4, 24, 96), mask_captions
        ),
        compare_kernels(
            "packed captions",
            lambda: SelfAttention(128, 2, 0.0),
            (1, sum(LENGTHS), 128),
            lay_out_captions,
        ),
    ]


def check(name: str, error: float, tolerance: float) -> None:
    assert error < tolerance, f"{name}: {error}"


def check_dropout() -> None:
    """Check the fraction that is dropped, and that both passes use one mask: the gradient is the
    slope between two points."""
    attention = SelfAttention(96, 3, 0.3)
    attention.kernel = "triton"
    (mask,) = mask_captions(torch.device("cpu"))
    tokens, direction, probe = (torch.randn(4, 24, 96) for _ in range(3))

    def attend(tokens: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(tokens, mask)

    (gradient,) = torch.autograd.grad(attend(tokens.requires_grad_()), tokens, probe)
    attention.requires_grad_(False)
    tokens = tokens.detach()
    slope = (attend(tokens + 1e-2 * direction) - attend(tokens - 1e-2 * direction)) / 2e-2
    expected = float((gradient * direction).sum())
    check("slope", abs(float((slope * probe).sum()) / expected - 1), 1e-2)

    torch.nn.init.zeros_(attention.value.weight)
    torch.nn.init.ones_(attention.value.bias)
    # With equal values, outputs are sums of scaled weights.
    sums = attend(tokens)[:, :, ::32]
    check(
        "mean of the sums", abs(float(sums.mean()) - 1), 5 * float(sums.std()) / sums.numel() ** 0.5
    )
    check("all weights are there", 0.1, float(sums.std()))
    attention.eval()
    random_state = torch.get_rng_state()
    attention(tokens, mask)
    # An evaluation must not change what training draws next.
    is_changed = not torch.equal(torch.get_rng_state(), random_state)
    check("random numbers of an evaluation", float(is_changed), 0.5)


def check_tiles(product: Any) -> None:
    """Check the module `gelu_linear_triton` with the tiles of all architectures."""
    tiles = (product.SMALL, product.LARGE)
    for tokens, channels, units in GELU_LINEAR_CASES:
        shapes = [(tokens, channels), (channels, units), (tokens, units)]
        inputs = draw_tensors(tokens, shapes, [1.0, channels**-0.5, 1.0])
        d_output, weight, hidden = (tensor.double() for tensor in inputs)
        d_active = d_output @ weight
        torch.nn.functional.gelu(hidden.requires_grad_()).backward(d_active)
        assert hidden.grad is not None
        expected = [hidden.grad, hidden.grad.sum(dim=0)]
        for dtype, tile in itertools.product((torch.bfloat16, torch.float16), tiles):
            halves = [tensor.to(dtype) for tensor in inputs]
            d_hidden, partial_sums = product.compute_gradients(*halves, tile)
            d_hidden_error, d_bias_error = errors([d_hidden, partial_sums.sum(dim=0)], expected)
            name = f"{tile.units} units, {tokens} tokens, {dtype}"
            check(name, d_hidden_error, 2 * torch.finfo(dtype).eps)
            # Sums aren't rounded to 16 bits.
            check(f"bias, {name}", d_bias_error, TOLERANCE[torch.float32])


def main() -> None:
    """Check every comparison, MLPs under autocast and compiled for any number of tokens, tiles, and
    dropout."""
    from clap_ds.model.mlp_triton import gelu_linear_triton, triton_mlp

    for name, compute, exact, inputs in kernel_comparisons():
        for dtype in (torch.float32, torch.bfloat16):
            error = largest_error(compute, exact, inputs, dtype)
            check(f"{name}, {dtype}", error, TOLERANCE[dtype])

    in_bf16 = torch.autocast("cpu", torch.bfloat16)(triton_mlp)
    for dim in (96, 192):
        _, _, exact, inputs = compare_mlp(128, dim)
        error = largest_error(in_bf16, exact, inputs, torch.float32)
        check(f"autocast, {dim} channels", error, TOLERANCE[torch.bfloat16])

    compiled = torch.compile(triton_mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    sizes = itertools.product(((36, torch.float32), (192, torch.bfloat16)), (132, 90))
    for (dim, dtype), num_tokens in sizes:
        _, _, exact, inputs = compare_mlp(num_tokens, dim)
        error = largest_error(compiled, exact, inputs, dtype)
        check(f"compiled, {num_tokens} tokens, {dim} channels", error, TOLERANCE[dtype])
    check_tiles(gelu_linear_triton)
    check_dropout()


if __name__ == "__main__":
    main()
