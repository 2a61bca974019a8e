"""Compare kernels of attention and MLPs with their eager forms. As a command, check Triton's with
its interpreter.

    TRITON_INTERPRET=1 python tests/model/kernel_cases.py

The interpreter must be selected before Triton is imported, so these cases need a separate process.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.shifted_windows import shifted_window_mask
from clap_ds.model.swin import WindowAttention
from clap_ds.model.text import Intermediate
from clap_ds.model.window_attention import attend_windows

Case = tuple[int, int, int, int]
Compute = Callable[..., Tensor]

# grid, heads, head dim, shift: like the stages of tiny (24) and base (32) but smaller; one window;
# an odd number of windows
CASES: list[Case] = [
    (16, 4, 24, 0),
    (16, 4, 24, 4),
    (16, 2, 32, 4),
    (8, 2, 32, 0),
    (24, 1, 24, 4),
    (16, 1, 8, 3),
]
# tokens, channels: the narrow stages of tiny and base, with full and partial blocks of tokens; then
# widths that aren't fused
MLP_CASES: list[tuple[int, int]] = [(128, 96), (200, 48), (130, 128), (132, 36), (60, 192)]
# real tokens of captions of 24 rows, channels of a head: padded, one without real tokens
CAPTION_CASES: list[tuple[tuple[int, ...], int]] = [((24, 3, 17, 0, 1), 32), ((24, 24), 64)]
HEADS = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.003}
"""Relative to the largest value: a few roundings of the dtype, in other places than the eager
form's."""


def mask_of(case: Case, device: torch.device) -> Tensor | None:
    grid, _, _, shift = case
    return shifted_window_mask(grid, 8, shift).to(device) if shift else None


def eager(case: Case) -> Compute:
    """Return attention as plain operations on q, k, v and the bias."""

    def attend(*qkv_and_bias: Tensor) -> Tensor:
        *qkv, bias_ANN = qkv_and_bias
        mask, (grid, heads, _, shift) = mask_of(case, bias_ANN.device), case
        place = (
            torch.arange(grid**2, device=bias_ANN.device)
            .view(grid, grid)
            .roll((-shift, -shift), (0, 1))
        )
        output = torch.zeros_like(qkv[0]).flatten(1, 2)
        for number, (row, column) in enumerate(itertools.product(range(0, grid, 8), repeat=2)):
            tokens = place[row : row + 8, column : column + 8].flatten()  # of one window
            q, k, v = (
                each.flatten(1, 2)[:, tokens].unflatten(2, (heads, -1)).transpose(1, 2)
                for each in qkv
            )
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias_ANN
            scores = scores if mask is None else scores + mask[number].to(scores.dtype)
            output = output.index_copy(
                1, tokens, (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
            )
        return output.unflatten(1, (grid, grid))

    return attend


def by(kernel: str, case: Case) -> Compute:
    """Return the model's attention with this kernel."""

    def attend(*qkv_and_bias: Tensor) -> Tensor:
        *qkv, bias = qkv_and_bias
        return attend_windows(
            torch.cat(qkv, dim=3), bias, mask_of(case, bias.device), 8, case[3], kernel
        )

    return attend


def draw(case: Case, clips: int = 3, spread: float = 1.0) -> list[Tensor]:
    """Draw q, k, v, bias and the output's gradient in bf16."""
    grid, heads, dim, shift = case
    generator = torch.Generator().manual_seed(grid * 100 + dim + shift)
    shapes = [(clips, grid, grid, heads * dim)] * 3 + [
        (heads, 64, 64),
        (clips, grid, grid, heads * dim),
    ]
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [each * spread for each in tensors[:3]] + tensors[3:]


def calling(module: torch.nn.Module, *others: object) -> Compute:
    """Return a module as a function of tokens and its parameters, in their order."""

    def compute(tokens: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return functional_call(module, named, (tokens, *others))

    return compute


def draw_module(module: torch.nn.Module, *shape: int) -> list[Tensor]:
    """Draw tokens of this shape, a module's parameters and the output's gradient in bf16."""
    generator = torch.Generator().manual_seed(sum(shape))
    shapes = [shape, *(each.shape for each in module.parameters()), shape]
    drawn = [torch.randn(each, generator=generator).bfloat16() for each in shapes]
    return [each * each.shape[1] ** -0.5 if each.ndim == 2 else each for each in drawn]


def module_cases() -> Iterator[
    tuple[torch.nn.Module, torch.nn.Module, Sequence[object], list[Tensor]]
]:
    """Yield modules with Triton kernels and with torch's, more arguments, and what is drawn."""
    for case in CASES[1:3]:
        grid, heads, dim, shift = case
        ours, exact = (WindowAttention(heads * dim, 8, heads) for _ in range(2))
        ours.kernel = "triton"
        yield (
            ours,
            exact,
            (mask_of(case, torch.device("cpu")), shift),
            draw_module(exact, 2, grid, grid, heads * dim),
        )
    halves = Intermediate(24, 96), Intermediate(24, 96)
    halves[0].kernel = "triton"
    mlp, plain = (torch.nn.Sequential(each, torch.nn.Linear(96, 24)) for each in halves)
    yield mlp, plain, (), draw_module(plain, 3, 25, 24)


def eager_mlp(
    tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Compute the MLP with plain operations."""
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)


def draw_mlp(tokens: int, dim: int) -> list[Tensor]:
    """Draw tokens (2, T / 2, C), parameters and the output's gradient in bf16; hidden values extend
    to GELU's tails."""
    generator = torch.Generator().manual_seed(tokens + dim)
    shapes = [
        (2, tokens // 2, dim),
        (4 * dim, dim),
        (4 * dim,),
        (dim, 4 * dim),
        (dim,),
        (2, tokens // 2, dim),
    ]
    spread = [1.0, 1.5 * dim**-0.5, 1.0, (4 * dim) ** -0.5, 1.0, 1.0]
    return [
        torch.randn(shape, generator=generator).bfloat16() * s
        for shape, s in zip(shapes, spread, strict=True)
    ]


def eager_captions(
    *inputs: Tensor, lengths: Sequence[int], dropped: Sequence[Tensor] | None = None
) -> Tensor:
    """Compute attention of captions of 24 rows from tokens, weights and biases of q, k and v by
    plain operations."""
    tokens, *parameters = inputs
    qkv = F.linear(tokens, *parameters)
    found = []
    for number, length in enumerate(lengths):
        q, k, v = (
            qkv[24 * number : 24 * (number + 1)].unflatten(1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        )
        k = k[:, : max(length, 1)]
        v = v[:, : max(length, 1)]
        weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        weights = (
            weights
            if dropped is None
            else weights * dropped[number].to(weights)[..., : max(length, 1)]
        )
        found.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


def captions_by_triton(*inputs: Tensor, lengths: Sequence[int], dropout: float = 0.0) -> Tensor:
    """Compute it by the kernel; the bias that the product adds gets its gradient from the
    kernel."""
    from clap_ds.model.text_attention_triton import triton_text_attention

    tokens, weight, bias = inputs
    bounds = 24 * torch.arange(len(lengths) + 1, dtype=torch.int32, device=tokens.device)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=tokens.device)
    torch.manual_seed(5)
    return triton_text_attention(
        F.linear(tokens, weight, bias.detach()), bias, bounds, sizes, HEADS, 24, dropout
    )


def draw_captions(lengths: Sequence[int], dim: int) -> list[Tensor]:
    """Draw tokens (T, 40), the product's parameters and the output's gradient in bf16."""
    generator = torch.Generator().manual_seed(dim)
    shapes = [
        (24 * len(lengths), 40),
        (3 * HEADS * dim, 40),
        (3 * HEADS * dim,),
        (24 * len(lengths), HEADS * dim),
    ]
    spread = [1.0, 0.15, 0.5, 1.0]
    return [
        torch.randn(shape, generator=generator).bfloat16() * s
        for shape, s in zip(shapes, spread, strict=True)
    ]


def kept_by_dropout(lengths: Sequence[int], dropout: float) -> list[Tensor]:
    """Return (heads, 24, 24) by caption: the scaled mask that the kernel draws, seen by equal
    weights and a unit matrix."""
    qkv = torch.zeros(24 * len(lengths), 3, HEADS, 32)
    qkv[:, 2] = torch.eye(24, 32).repeat(len(lengths), 1)[:, None]
    weight = torch.eye(3 * HEADS * 32)
    bias = torch.zeros(3 * HEADS * 32)
    seen = captions_by_triton(
        qkv.flatten(1), weight, bias, lengths=[24] * len(lengths), dropout=dropout
    )
    return list(
        24 * seen.unflatten(1, (HEADS, 32)).unflatten(0, (-1, 24)).transpose(1, 2)[..., :24]
    )


def results(
    compute: Compute, inputs: Sequence[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return output and gradients in fp64; the last input is the output's gradient."""
    *leaves, probe = (tensor.detach().clone().to(device, dtype) for tensor in inputs)
    output = compute(*(each.requires_grad_() for each in leaves))
    assert output.dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else dtype)
    found = output, *torch.autograd.grad(output, leaves, probe.to(output.dtype))
    return [each.detach().double().cpu() for each in found]


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest difference of each tensor relative to its largest value."""
    return [
        float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)
    ]


def largest_error(
    compute: Compute, exact: Compute, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> float:
    """Return the largest relative error of output and gradients, compared with the eager form in
    fp64."""
    return max(
        errors(results(compute, inputs, dtype, device), results(exact, inputs, torch.float64))
    )


def main() -> None:
    """Print a line per case: window attention in fp32, two cases also in bf16; modules in both;
    MLPs in both and under autocast, and compiled for any number of tokens; captions in both, and
    with dropout."""
    from clap_ds.model.mlp_triton import triton_mlp

    trials = [(case, torch.float32) for case in CASES] + [
        (case, torch.bfloat16) for case in CASES[1:3]
    ]
    found = [
        (case, dtype, largest_error(by("triton", case), eager(case), draw(case), dtype))
        for case, dtype in trials
    ]
    for (ours, exact, others, drawn), dtype in itertools.product(
        module_cases(), (torch.float32, torch.bfloat16)
    ):
        error = largest_error(calling(ours, *others), calling(exact, *others), drawn, dtype)
        found.append((type(ours), dtype, error))
    for mlp in MLP_CASES:
        for dtype in (torch.float32, torch.bfloat16):
            found.append((mlp, dtype, largest_error(triton_mlp, eager_mlp, draw_mlp(*mlp), dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            casted = results(triton_mlp, draw_mlp(*mlp), torch.float32)
        found.append(
            (
                mlp,
                torch.bfloat16,
                max(errors(casted, results(eager_mlp, draw_mlp(*mlp), torch.float64))),
            )
        )
    compiled = torch.compile(triton_mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    for mlp in ((132, 36), (90, 36)):
        found.append(
            (mlp, torch.float32, largest_error(compiled, eager_mlp, draw_mlp(*mlp), torch.float32))
        )
    for lengths, dim in CAPTION_CASES:
        for dtype in (torch.float32, torch.bfloat16):
            ours, theirs = (
                partial(each, lengths=lengths) for each in (captions_by_triton, eager_captions)
            )
            found.append(
                (
                    (lengths, dim),
                    dtype,
                    largest_error(ours, theirs, draw_captions(lengths, dim), dtype),
                )
            )
    lengths = CAPTION_CASES[0][0]
    share = 0.3
    kept = kept_by_dropout(lengths, share)
    ours = partial(captions_by_triton, lengths=lengths, dropout=share)
    theirs = partial(eager_captions, lengths=lengths, dropped=kept)
    found.append(
        (
            share,
            torch.float32,
            largest_error(ours, theirs, draw_captions(lengths, 32), torch.float32),
        )
    )
    drawn = torch.cat([each.flatten() for each in kept])
    off = abs(float((drawn == 0).double().mean()) - share) / (
        5 * (share * (1 - share) / len(drawn)) ** 0.5
    )
    found.append(
        (
            share,
            torch.float32,
            0.0 if off < 1 and drawn.max().sub(1 / (1 - share)).abs() < 1e-5 else 1.0,
        )
    )
    for case, dtype, error in found:
        print("ok" if error < TOLERANCE[dtype] else "FAILED", case, dtype, error)


if __name__ == "__main__":
    main()
