"""What the published text tower keeps for the backward pass: the bytes that analysis/FLOPS.md argues with, against what
autograd saves of the real tower."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.config.model import load_preset
from clap_ds.model import text_attention
from clap_ds.model.text import TextTower
from clap_ds.planning.trace import trace

BYTES = {False: 34, True: 42}
"""Per token, channel and layer, without and with autocast (analysis/FLOPS.md, after arXiv 2205.05198, section 4.1)."""
DROPOUT_MASK_BYTES = 2
"""Of these, added by hand: a mask takes 1 byte an element on a GPU but more on a CPU, so dropout is off in the count."""


def _saved_bytes(num_captions: int, num_tokens: int, *, autocast: bool) -> int:
    """Of storages that a forward pass leaves alive, on fake tensors."""
    with torch.device("meta"):
        tower = TextTower(load_preset("htsat_tiny_roberta_base").text, dropout=0.0, from_hub=False)
    tower.compute_every_token()  # as the published runs did, and by fused attention
    tower = tower if autocast else tower.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.full((num_captions, num_tokens), 5)
        tower.to_empty(device="cpu")
        fused = mock.patch.object(text_attention, "_attend_padded", F.scaled_dot_product_attention)
        with fused, trace() as recorded, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _pooled = tower(ids, None)  # whose graph holds what is saved
            return recorded.live_bytes


@pytest.mark.parametrize(
    ("num_tokens", "gigabytes"), [(77, {False: 15.0, True: 18.5}), (512, {False: 100.0, True: 123.3})]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_formula_and_counted_tensors_agree(autocast: bool, num_tokens: int, gigabytes: dict[bool, float]) -> None:
    """At the published micro-batch. Copies of weights, which don't grow with the batch, drop out of a difference."""
    elements = 12 * 768 * 616 * num_tokens
    of_two, of_three = (_saved_bytes(number, num_tokens, autocast=autocast) for number in (2, 3))
    counted = 616 * (of_three - of_two) + DROPOUT_MASK_BYTES * elements
    assert BYTES[autocast] * elements < counted < 1.02 * BYTES[autocast] * elements
    assert counted / 1e9 == pytest.approx(gigabytes[autocast], abs=0.05)  # as printed there
