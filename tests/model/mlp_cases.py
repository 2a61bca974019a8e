"""The fused MLP against the eager form; run by itself under Triton's interpreter.

    TRITON_INTERPRET=1 python tests/model/mlp_cases.py

The interpreter must be chosen before Triton is imported, so those cases need a process of their own.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.mlp_triton import triton_mlp

Case = tuple[int, int]
Compute = Callable[..., Tensor]

# tokens, channels: the narrow stages of tiny and base; blocks of tokens that are full, begun, or there in part alone
CASES: list[Case] = [(128, 96), (200, 192), (130, 128), (10, 256)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
"""Of the largest value; a few roundings of the dtype, at other places than the eager form's."""


def eager(tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """One plain operation after the other."""
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)


def draw(case: Case) -> list[Tensor]:
    """Tokens (2, T / 2, C), parameters and the output's gradient in bf16; hidden values reach into GELU's tails."""
    tokens, dim = case
    generator = torch.Generator().manual_seed(tokens + dim)
    shapes = [(2, tokens // 2, dim), (4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,), (2, tokens // 2, dim)]
    spread = [1.0, 1.5 * dim**-0.5, 1.0, (4 * dim) ** -0.5, 1.0, 1.0]
    return [torch.randn(shape, generator=generator).bfloat16() * s for shape, s in zip(shapes, spread, strict=True)]


def results(compute: Compute, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Output and gradients, in fp64."""
    *tensors, probe = (tensor.detach().clone().to(device, dtype) for tensor in inputs)
    output = compute(*(each.requires_grad_() for each in tensors))
    assert output.dtype == dtype
    output.backward(probe)
    return [each.detach().double().cpu() for each in (output, *(tensor.grad for tensor in tensors)) if each is not None]


def largest_error(compute: Compute, case: Case, dtype: torch.dtype, device: str = "cpu") -> float:
    """Largest difference from the eager form in fp64, of output and gradients, over the largest value of each."""
    inputs = draw(case)
    pairs = zip(results(compute, inputs, dtype, device), results(eager, inputs, torch.float64), strict=True)
    return max(float((got - x).abs().max() / x.abs().max()) for got, x in pairs)


if __name__ == "__main__":
    dtypes = (torch.float32, torch.bfloat16)
    found = {(case, dtype): largest_error(triton_mlp, case, dtype) for case in CASES for dtype in dtypes}
    for (case, dtype), error in found.items():
        print("ok" if error < TOLERANCE[dtype] else "FAILED", "tokens, channels", case, dtype, error)
    with torch.autocast("cpu", torch.bfloat16):
        *tensors, _ = (tensor.float() for tensor in draw(CASES[0]))
        same = torch.equal(triton_mlp(*tensors), triton_mlp(*(tensor.bfloat16() for tensor in tensors)))
        print("ok" if same else "FAILED", "autocast")
    sys.exit(not same or any(error >= TOLERANCE[dtype] for (_, dtype), error in found.items()))
