"""Define Swin transformer stages on square token grids (arXiv 2103.14030), the main part of HTSAT.

Shape letters: B batch, H and W the token grid, G windows of a clip, N tokens of a window, A
attention heads, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import AudioConfig
from clap_ds.model.shifted_windows import relative_position_index, shifted_window_mask
from clap_ds.model.window_attention import attend_windows

INIT_STD = 0.02


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382), which drops a residual branch per clip in training."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return branch
        keep_probability = 1.0 - self.probability
        # One draw per clip, (B, 1, …), divided by its mean.
        shape = (len(branch), *[1] * (branch.ndim - 1))
        mask = branch.new_empty(shape).bernoulli_(keep_probability)
        return branch * mask.div_(keep_probability)


class WindowAttention(nn.Module):
    """Multi-head attention within windows, with a learned bias per relative position."""

    relative_position_index: Tensor

    def __init__(self, dim: int, window: int, num_heads: int) -> None:
        super().__init__()
        self.window = window
        # Of `window_attention.py`.
        self.kernel = "sdpa"
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.relative_position_bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        # As in Swin; `_init_weights` of the tower leaves it.
        nn.init.trunc_normal_(self.relative_position_bias, std=INIT_STD)
        self.register_buffer(
            "relative_position_index", relative_position_index(window), persistent=False
        )

    def position_bias(self) -> Tensor:
        """Return (A, N, N) in at least fp32, as a table row's gradient is a sum over up to N places
        in this dtype."""
        index_NN = self.relative_position_index
        # Not fp32 itself, so that a model in fp64 stays in fp64.
        dtype = torch.promote_types(self.relative_position_bias.dtype, torch.float32)
        table = self.relative_position_bias.to(dtype)
        bias_NNA = table[index_NN.flatten()].unflatten(0, index_NN.shape)
        return bias_NNA.permute(2, 0, 1)

    def forward(self, tokens_BHWC: Tensor, mask_GNN: Tensor | None, shift: int) -> Tensor:
        qkv_bias_E = None
        if self.kernel == "triton":
            # Detached, because the kernel computes the bias's gradient.
            qkv_bias_E = self.qkv.bias
            qkv_BHWE = F.linear(tokens_BHWC, self.qkv.weight, qkv_bias_E.detach())
        else:
            qkv_BHWE = self.qkv(tokens_BHWC)
        mixed_BHWC = attend_windows(
            qkv_BHWE,
            self.position_bias(),
            mask_GNN,
            self.window,
            shift,
            self.kernel,
            qkv_bias_E,
        )
        return self.proj(mixed_BHWC)


class Mlp(nn.Module):
    """Linear, GELU, linear. `kernel` is `torch`, or one of Triton's (`mlp_triton.py`)."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.kernel = "torch"
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.fc2 = nn.Linear(ratio * dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.kernel.startswith("triton"):
            from clap_ds.model.mlp_triton import triton_mlp

            parameters = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
            return triton_mlp(tokens, *parameters, self.kernel)
        return self.fc2(F.gelu(self.fc1(tokens)))


class SwinBlock(nn.Module):
    """A pre-norm transformer block on a square token grid; `shift` > 0 shifts the grid cyclically
    under the windows."""

    def __init__(
        self, dim: int, window: int, shift: int, num_heads: int, mlp_ratio: int, drop_path: float
    ) -> None:
        super().__init__()
        self.shift = shift
        self.norm1 = nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, window, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, mlp_ratio)
        # Both branches of a block have the same probability.
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens_BHWC: Tensor, mask_GNN: Tensor | None) -> Tensor:
        mixed_BHWC = self.attention(self.norm1(tokens_BHWC), mask_GNN, self.shift)
        tokens_BHWC = tokens_BHWC + self.drop_path(mixed_BHWC)
        return tokens_BHWC + self.drop_path(self.mlp(self.norm2(tokens_BHWC)))


class PatchMerging(nn.Module):
    """A merger of each 2×2 square of tokens: (B, H, W, C) → (B, H/2, W/2, 2C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        # The norm is before the reduction, over 4·C channels.
        return self.reduction(self.norm(self.gather_2x2(tokens_BHWC)))

    @staticmethod
    def gather_2x2(tokens_BHWC: Tensor) -> Tensor:
        """Rearrange (B, H, W, C) to (B, H/2, W/2, 4C)."""
        # (B, H/2, 2, W/2, 2, C); Swin's order of the four is by columns.
        squares = tokens_BHWC.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        return squares.permute(0, 1, 3, 4, 2, 5).flatten(3)


class Stage(nn.Module):
    """Blocks on one token grid, every second one shifted, then patch merging unless it is the last
    stage."""

    mask: Tensor | None

    def __init__(
        self, config: AudioConfig, stage: int, drop_paths: list[float], *, checkpoint: bool
    ) -> None:
        super().__init__()
        # Whether blocks store only their input for the backward pass.
        self.checkpoint = checkpoint
        self.grid = config.stage_grids[stage]
        dim = config.stage_dims[stage]
        # A grid of one window isn't shifted.
        window = min(config.attention_window, self.grid)
        shift = window // 2 if self.grid > window else 0
        self.blocks = nn.ModuleList()
        for number, drop_path in enumerate(drop_paths):
            block_shift = shift if number % 2 else 0
            heads = config.num_heads[stage]
            block = SwinBlock(dim, window, block_shift, heads, config.mlp_ratio, drop_path)
            self.blocks.append(block)
        is_last = stage == config.num_stages - 1
        self.merge = nn.Identity() if is_last else PatchMerging(dim)
        mask_GNN = shifted_window_mask(self.grid, window, shift) if shift else None
        self.register_buffer("mask", mask_GNN, persistent=False)

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        for block in self.blocks:
            # In evaluation there is nothing to recompute.
            if self.checkpoint and self.training:
                tokens_BHWC = checkpoint(block, tokens_BHWC, self.mask, use_reentrant=False)
            else:
                tokens_BHWC = block(tokens_BHWC, self.mask)
        return self.merge(tokens_BHWC)
