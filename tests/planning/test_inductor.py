"""Check the kernels that Inductor would make on a GPU."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.settings import load_run
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.step import compiled_kernels
from tests.processes import ROOT


def test_what_lies_between_products_is_one_kernel_per_direction() -> None:
    size = 1024 * 512 * 2
    weights = [torch.empty(512, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]

    def layers(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(tokens, weights[0])) * 2, weights[1])

    for _ in range(2):  # the second time too
        kernels = fused_kernels(layers, torch.empty(1024, 512, dtype=torch.bfloat16))
        assert kernels == [
            (False, 2 * size),
            (True, 3 * size),
        ]  # GELU backward also reads its input


@pytest.mark.end_to_end  # takes half a minute
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older schedulers fuse less")
def test_bytes_of_the_published_workloads_towers() -> None:
    """A change of the model that adds a pass over activations fails here."""
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1)
    gigabytes = Counter[tuple[str, bool]]()
    for each in compiled_kernels(run, 616):
        gigabytes[each.part, each.backward] += each.bytes_moved / 1e9
    expected = {
        ("audio", False): 38.9,
        ("audio", True): 32.4,
        ("text", False): 14.3,
        ("text", True): 12.1,
    }
    assert gigabytes == pytest.approx(expected, rel=0.02)
