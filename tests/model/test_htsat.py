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


def test_spec_augment_draws_stripes_per_clip() -> None:
    """Check for two stripes per axis, with uniform widths below the limit."""
    torch.manual_seed(0)
    for num_mels, num_frames, dim, limit in ((16, 1001, 1, 64), (64, 150, 2, 8)):
        masked = SpecAugment()(torch.ones(1, 1, 1).expand(2000, num_mels, num_frames)) == 0
        whole_rows = masked.all(dim=2, keepdim=True)
        whole_columns = masked.all(dim=1, keepdim=True)
        assert torch.equal(masked, whole_rows | whole_columns)
        stripes = masked.all(dim=dim)
        total = stripes.sum(dim=1)
        starts = (stripes & ~F.pad(stripes, (1, 0))[:, :-1]).sum(dim=1)
        assert starts.max() == 2
        assert total.max() <= 2 * (limit - 1)
        # Of two stripes, uniform in 0 … limit - 1, which rarely overlap.
        mean_width = (limit - 1) / 2
        overlap = mean_width * mean_width / stripes.shape[1]
        assert total.float().mean().item() == pytest.approx(2 * mean_width - overlap, rel=0.03)


def test_drop_path_drops_whole_clips_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(20000, 2, 2, 3)).flatten(1)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    branch = torch.ones(4, 2)
    assert torch.equal(DropPath(0.25).eval()(branch), branch)


def test_full_size_has_initial_weights_and_shifts_of_laion() -> None:
    model = HTSAT(FULL, drop_path=0.1, spec_augment=True)
    shifts = [[block.shift for block in stage.blocks] for stage in model.stages]
    assert shifts == [[0, 4], [0, 4], [0, 4, 0, 4, 0, 4], [0, 0]]
    blocks = [block for stage in model.stages for block in stage.blocks]
    probabilities = [block.drop_path.probability for block in blocks]
    assert probabilities == pytest.approx([0.1 * number / 11 for number in range(12)])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert module.bias is None or (module.bias == 0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name
    tables = torch.cat([block.attention.relative_position_bias.flatten() for block in blocks])
    assert tables.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.tscam_conv.weight.shape == (527, 768, 2, 3)
