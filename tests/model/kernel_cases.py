"""Compare kernels of attention and MLPs with their eager forms. As a command, check Triton's with
its interpreter.

    TRITON_INTERPRET=1 python tests/model/kernel_cases.py

The interpreter must be selected before Triton is imported, so these cases need a separate process.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.shifted_windows import shifted_window_mask
from clap_ds.model.swin import WindowAttention
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
CASES = [Case(16, 4, 24, 4), Case(8, 2, 32, 0), Case(24, 1, 8, 3)]
# Tokens and channels: partial blocks of tokens, full ones, and a width that isn't fused.
MLP_CASES = [(200, 48), (128, 96), (132, 36)]
# Real tokens of captions of 24 rows (one has none), and channels of a head.
CAPTION_CASES: list[tuple[tuple[int, ...], int]] = [((24, 3, 17, 0, 1), 32), ((24, 24), 64)]
ROWS = 24
HEADS = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.003}
"""Relative to the largest value: a few roundings of the dtype, in other places than the eager
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


def eager(case: Case) -> Compute:
    """Return attention as plain operations on q, k, v and the bias, window by window."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias_ANN: Tensor) -> Tensor:
        mask = mask_of(case, bias_ANN.device)
        index = torch.arange(case.grid**2, device=bias_ANN.device).view(case.grid, case.grid)
        shifted_index = index.roll((-case.shift, -case.shift), (0, 1))
        output = torch.zeros_like(query).flatten(1, 2)
        corners = itertools.product(range(0, case.grid, 8), repeat=2)
        for number, (row, column) in enumerate(corners):
            tokens = shifted_index[row : row + 8, column : column + 8].flatten()
            q, k, v = (
                tensor.flatten(1, 2)[:, tokens].unflatten(2, (case.heads, -1)).transpose(1, 2)
                for tensor in (query, key, value)
            )
            scores = q @ k.transpose(-1, -2) * case.dim**-0.5 + bias_ANN
            if mask is not None:
                scores = scores + mask[number].to(scores.dtype)
            mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
            output = output.index_copy(1, tokens, mixed)
        return output.unflatten(1, (case.grid, case.grid))

    return attend


def by(kernel: str, case: Case) -> Compute:
    """Return the model's attention with this kernel."""

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


def eager_mlp(
    tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Compute the MLP with plain operations."""
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)


def draw_mlp(num_tokens: int, dim: int) -> list[Tensor]:
    """Draw tokens (2, T / 2, C), parameters and the output's gradient; hidden values extend to
    GELU's tails."""
    tokens = (2, num_tokens // 2, dim)
    shapes = [tokens, (4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,), tokens]
    scales = [1.0, 1.5 * dim**-0.5, 1.0, (4 * dim) ** -0.5, 1.0, 1.0]
    return draw_tensors(dim, shapes, scales)


def eager_captions(
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    lengths: Sequence[int],
    masks: Sequence[Tensor] | None = None,
) -> Tensor:
    """Compute attention of captions from tokens, and weights and biases of q, k and v, by plain
    operations. `masks` are factors on the attention weights."""
    mixed = []
    for number, rows in enumerate(F.linear(tokens, weight, bias).split(ROWS)):
        q, k, v = rows.unflatten(1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        num_keys = max(lengths[number], 1)
        scores = q @ k[:, :num_keys].transpose(1, 2) * q.shape[-1] ** -0.5
        weights = scores.softmax(dim=-1)
        if masks is not None:
            weights = weights * masks[number].to(weights)[..., :num_keys]
        mixed.append((weights @ v[:, :num_keys]).transpose(0, 1).flatten(1))
    return torch.cat(mixed)


def triton_captions(
    tokens: Tensor, weight: Tensor, bias: Tensor, *, lengths: Sequence[int], dropout: float = 0.0
) -> Tensor:
    """Compute `eager_captions` by the kernel, which also computes the gradient of the bias that the
    product adds."""
    from clap_ds.model.text_attention_triton import triton_text_attention

    device = tokens.device
    cu_seqlens = ROWS * torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    num_keys = torch.tensor(lengths, dtype=torch.int32, device=device)
    torch.manual_seed(5)
    qkv = F.linear(tokens, weight, bias.detach())
    return triton_text_attention(qkv, bias, cu_seqlens, num_keys, HEADS, ROWS, dropout)


def draw_captions(lengths: Sequence[int], dim: int) -> list[Tensor]:
    """Draw tokens (T, 40), the product's parameters and the output's gradient."""
    num_rows = ROWS * len(lengths)
    width = HEADS * dim
    shapes = [(num_rows, 40), (3 * width, 40), (3 * width,), (num_rows, width)]
    return draw_tensors(dim, shapes, [1.0, 0.15, 0.5, 1.0])


def drawn_masks(num_captions: int, dropout: float) -> Tensor:
    """Return the factors of the kernel's dropout, (captions, heads, rows, keys): what it returns
    for equal weights 1 / 24 and one-hot values."""
    qkv = torch.zeros(num_captions, ROWS, 3, HEADS, 32)
    qkv[:, :, 2] = torch.eye(ROWS, 32)[:, None]
    width = 3 * HEADS * 32
    parameters = torch.eye(width), torch.zeros(width)
    lengths = [ROWS] * num_captions
    weights = triton_captions(qkv.view(-1, width), *parameters, lengths=lengths, dropout=dropout)
    return ROWS * weights.view(num_captions, ROWS, HEADS, 32)[..., :ROWS].transpose(1, 2)


def results(
    compute: Compute, inputs: Sequence[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return output and gradients in fp64; the last input is the output's gradient."""
    *leaves, probe = (tensor.detach().clone().to(device, dtype) for tensor in inputs)
    output = compute(*(leaf.requires_grad_() for leaf in leaves))
    assert output.dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else dtype)
    gradients = torch.autograd.grad(output, leaves, probe.to(output.dtype))
    return [tensor.detach().double().cpu() for tensor in (output, *gradients)]


def errors(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest difference of each tensor relative to its largest value."""
    pairs = zip(tensors, expected, strict=True)
    return [float((tensor - exact).abs().max() / exact.abs().max()) for tensor, exact in pairs]


def largest_error(
    compute: Compute, exact: Compute, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> float:
    """Return the largest relative error of output and gradients, compared with the eager form in
    fp64."""
    expected = results(exact, inputs, torch.float64)
    return max(errors(results(compute, inputs, dtype, device), expected))


class Comparison(NamedTuple):
    """A computation with Triton's kernels, its eager form, and inputs for both."""

    name: str
    compute: Compute
    exact: Compute
    inputs: list[Tensor]


def calling(module: nn.Module, *arguments: object) -> Compute:
    """Return a module as a function of tokens and its parameters, in their order."""
    names = list(dict(module.named_parameters()))

    def compute(tokens: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return functional_call(module, named, (tokens, *arguments))

    return compute


def window_comparison(case: Case) -> Comparison:
    """Compare modules, so that the kernel's gradient of the qkv projection's bias is included."""
    width = case.heads * case.dim
    module, exact = (WindowAttention(width, 8, case.heads) for _ in range(2))
    module.kernel = "triton"
    arguments = mask_of(case, torch.device("cpu")), case.shift
    tokens = (2, case.grid, case.grid, width)
    shapes = [tokens, *(parameter.shape for parameter in exact.parameters()), tokens]
    scales = [shape[1] ** -0.5 if len(shape) == 2 else 1.0 for shape in shapes]
    inputs = draw_tensors(sum(case), shapes, scales)
    return Comparison(str(case), calling(module, *arguments), calling(exact, *arguments), inputs)


def kernel_comparisons() -> list[Comparison]:
    """Return a comparison of each kernel at each size."""
    from clap_ds.model.mlp_triton import triton_mlp

    comparisons = [window_comparison(case) for case in CASES]
    for size in MLP_CASES:
        comparisons.append(Comparison(f"MLP {size}", triton_mlp, eager_mlp, draw_mlp(*size)))
    for lengths, dim in CAPTION_CASES:
        compute = partial(triton_captions, lengths=lengths)
        exact = partial(eager_captions, lengths=lengths)
        inputs = draw_captions(lengths, dim)
        comparisons.append(Comparison(f"captions {lengths}, {dim}", compute, exact, inputs))
    return comparisons


def main() -> None:
    """Print a line per comparison and dtype, and for MLPs under autocast, an MLP compiled for any
    number of tokens, and dropout."""
    from clap_ds.model.mlp_triton import triton_mlp

    def report(name: str, dtype: torch.dtype, error: float) -> None:
        print("ok" if error < TOLERANCE[dtype] else "FAILED", name, dtype, error, flush=True)

    for name, compute, exact, inputs in kernel_comparisons():
        for dtype in (torch.float32, torch.bfloat16):
            report(name, dtype, largest_error(compute, exact, inputs, dtype))

    for size in MLP_CASES[1:]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = results(triton_mlp, draw_mlp(*size), torch.float32)
        expected = results(eager_mlp, draw_mlp(*size), torch.float64)
        report(f"autocast {size}", torch.bfloat16, max(errors(outputs, expected)))

    compiled = torch.compile(triton_mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in ((132, 36), (90, 36)):
        error = largest_error(compiled, eager_mlp, draw_mlp(*size), torch.float32)
        report(f"compiled {size}", torch.float32, error)

    p = 0.3
    lengths, dim = CAPTION_CASES[0]
    masks = drawn_masks(len(lengths), p)
    compute = partial(triton_captions, lengths=lengths, dropout=p)
    exact = partial(eager_captions, lengths=lengths, masks=list(masks))
    error = largest_error(compute, exact, draw_captions(lengths, dim), torch.float32)
    report("dropout", torch.float32, error)
    # Five standard deviations of the number of zeros.
    limit = 5 * (p * (1 - p) / masks.numel()) ** 0.5
    fraction = float((masks == 0).double().mean())
    report("dropped fraction", torch.float32, 0.0 if abs(fraction - p) < limit else 1.0)
    scale = masks[masks > 0]
    report("scale", torch.float32, float((scale - 1 / (1 - p)).abs().max()))
    tokens, weight, bias, _ = draw_captions(lengths, dim)
    # As `triton_captions` begins.
    random_state = torch.manual_seed(5).get_state()
    triton_captions(tokens, weight, bias, lengths=lengths)
    is_unchanged = torch.equal(torch.get_rng_state(), random_state)
    report("no dropout draws nothing", torch.float32, 0.0 if is_unchanged else 1.0)


if __name__ == "__main__":
    main()
