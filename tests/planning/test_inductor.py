"""Test which kernels Inductor would make on a GPU."""

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.step import compiled_kernels
from tests.processes import ROOT


def test_operations_between_products_are_one_kernel_per_direction() -> None:
    size = 1024 * 512 * 2
    weights = [torch.empty(512, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]

    def layers(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(tokens, weights[0])) * 2, weights[1])

    # The second call isn't answered from a cache. GELU backward also reads its input.
    for _ in range(2):
        kernels = fused_kernels(layers, torch.empty(1024, 512, dtype=torch.bfloat16))
        assert kernels == [(False, 2 * size), (True, 3 * size)]


@pytest.mark.end_to_end  # takes a quarter of a minute
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older schedulers fuse less")
def test_towers_of_the_published_workload_move_known_bytes() -> None:
    """A change of the model that adds a pass over activations fails here."""
    # All sizes are the published ones, but each stage and tower has one layer.
    sizes = load_preset("htsat_tiny_roberta_base").model_dump(mode="json")
    sizes["audio"]["depths"] = [1, 1, 1, 1]
    sizes["text"]["num_layers"] = 1
    changes = [f"clap.model.preset={json.dumps(sizes)}", "clap.model.pretrained_text=false"]
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1, changes)
    gigabytes = Counter[tuple[str, bool]]()
    for kernel in compiled_kernels(run, 616):
        gigabytes[kernel.part, kernel.backward] += kernel.bytes_moved / 1e9
    expected = {
        ("audio", False): 17.0,
        ("audio", True): 15.3,
        ("text", False): 0.817,
        ("text", True): 2.19,
    }
    assert gigabytes == pytest.approx(expected, rel=0.01)
