"""Test which kernels Inductor would make on a GPU."""

import torch
import torch.nn.functional as F

from clap_ds.planning.inductor import fused_kernels


def test_operations_between_products_are_one_kernel_per_direction() -> None:
    size = 1024 * 512 * 2
    weights = [torch.empty(512, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]

    def layers(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(tokens, weights[0])) * 2, weights[1])

    # The second call isn't answered from a cache. GELU backward also reads its input.
    for _ in range(2):
        kernels = fused_kernels(layers, torch.empty(1024, 512, dtype=torch.bfloat16))
        assert kernels == [(False, 2 * size), (True, 3 * size)]
