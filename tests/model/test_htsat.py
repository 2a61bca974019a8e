"""Test HTSAT's parts that comparisons of whole models don't cover: batch norm and SpecAugment in
training, initialization."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clap_ds.config.model import load_preset
from clap_ds.model.htsat import HTSAT, SpecAugment
from clap_ds.model.swin import DropPath

FULL = load_preset("htsat_tiny_roberta_base").audio


def test_spec_augment_draws_two_stripes_per_clip():
    """Widths are uniform below the limit."""
    torch.manual_seed(0)
    is_masked = SpecAugment()(torch.ones(2000, 64, 1001)) == 0
    masked_bins = is_masked.all(dim=2)
    masked_frames = is_masked.all(dim=1)
    assert torch.equal(is_masked, masked_bins[:, :, None] | masked_frames[:, None, :])
    for in_stripe, limit in ((masked_bins, 8), (masked_frames, 64)):
        starts = in_stripe & ~F.pad(in_stripe, (1, 0))[:, :-1]
        assert starts.sum(dim=1).max() == 2
        width = in_stripe.sum(dim=1)
        assert width.max() <= 2 * (limit - 1)
        # Of two stripes, uniform in 0 … limit - 1, which rarely overlap.
        mean_width = (limit - 1) / 2
        overlap = mean_width * mean_width / in_stripe.shape[1]
        assert width.float().mean().item() == pytest.approx(2 * mean_width - overlap, rel=0.03)


def test_drop_path_drops_whole_clips_and_keeps_the_mean():
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(20000, 2, 2, 3)).flatten(1)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)


def test_full_size_has_initial_weights_and_shifts_of_laion():
    model = HTSAT(FULL, drop_path=0.1, spec_augment=True)
    blocks = model.blocks()
    # The last stage's grid is one window.
    assert [block.shift for block in blocks] == [0, 4] * 5 + [0, 0]
    probabilities = [block.drop_path.probability for block in blocks]
    assert probabilities == pytest.approx([0.1 * number / 11 for number in range(12)])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert module.bias is None or not module.bias.any(), name
    tables = [block.attention.relative_position_bias.flatten() for block in blocks]
    assert torch.cat(tables).std().item() == pytest.approx(0.02, rel=0.05)
