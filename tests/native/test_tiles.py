"""The kernels' branch for AMX, its instructions emulated, against the implementation that a run takes on this processor."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from clap_ds.native import library
from clap_ds.native.linear import native_linears, native_mlp
from clap_ds.native.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from clap_ds.native.window_attention import native_window_attention
from tests.kernels import EMULATED, compiled_for, needs_kernels
from tests.native.exactness import numbers, results, threads

pytestmark = needs_kernels


def draw(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Numbers, those of matrices such that products with them are neither large nor small."""
    return [numbers(*size, seed=seed, scale=size[-1] ** -0.5) for seed, size in enumerate(sizes)]


def linears(rows: int, inputs: int, outputs: int) -> tuple:
    sizes = [(rows, inputs), (outputs, inputs), (outputs,), (outputs, inputs), (outputs,)]
    return native_linears, draw(*sizes), numbers(rows, 2 * outputs, seed=5)


def mlp() -> tuple:
    return native_mlp, draw((50, 64), (96, 64), (96,), (64, 96), (64,)), numbers(50, 64, seed=5)


def captions(head_dim: int, dropout: float) -> tuple:
    """Up to six tiles of keys, which are taken in strips of at most five."""
    rows = torch.tensor([1, 17, 40, 90, 0, 77]).int()
    segments = Segments.of_captions((rows.cumsum(0) - rows).int(), rows, first_only=False)
    *tensors, upstream = [numbers(225, 2 * head_dim, seed=seed) for seed in range(4)]

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return native_segment_attention(qkv, 2, segments, head_dim**-0.5, dropout)

    return attend, tensors, upstream


def windows(dim: int, shift: int, scale: float) -> tuple:
    """With the larger scale, scores are too large for their powers."""
    tensors = [numbers(2, 16, 16, 6 * dim, seed=0, scale=scale), numbers(2, 64, 64, seed=1)]
    return partial(native_window_attention, shift=shift), tensors, numbers(2, 16, 16, 2 * dim, seed=2)


CASES: dict[str, Callable[[], tuple]] = {
    "linear, one row": partial(linears, 1, 32, 32),
    "linear, sums in chunks of rows": partial(linears, 600, 64, 96),
    "linear, sums in slices": partial(linears, 33, 1568, 64),
    "linear, operands beyond the first cache": partial(linears, 70, 544, 544),
    "MLP": mlp,
    **{f"captions, {dim} wide, dropout {p}": partial(captions, dim, p) for dim in HEAD_DIMS for p in (0.0, 0.3)},
    **{
        f"windows, {dim} wide, {scale}": partial(windows, dim, 3, scale) for dim in (24, 32, 40, 64) for scale in (1, 6)
    },
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_branch_for_amx_computes_what_the_others_do(case: str, count: int) -> None:
    """Sums in another order move some bf16 results to the next number; the bound: all of them, by half of that."""
    found = []
    for name in (library.executable()[0], EMULATED):
        with compiled_for(name), threads(count):
            found.append(results(*CASES[case]()))
    for expected, emulated in zip(*found, strict=True):
        assert (emulated - expected).norm() < 2**-9 * expected.norm()
