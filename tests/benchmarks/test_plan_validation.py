"""Peaks of the allocator, known and predicted."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import allocated_peak
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.planning.trace import trace


def test_the_allocators_peak_is_of_the_window_alone() -> None:
    def prepare() -> Callable[[], object]:
        kept = torch.zeros(1 << 20)
        torch.zeros(1 << 22)  # gone before the window
        return lambda: kept + torch.zeros(1 << 20)

    assert allocated_peak(prepare) == pytest.approx(3 * 4 << 20, rel=1e-3)


def test_the_tracers_peak_is_the_allocators() -> None:
    """Of forward and backward, with and without recomputation, within the 5 % that plans promise."""

    config = load_preset("demo")

    def make(device: str) -> tuple[ClapModel, torch.Tensor, torch.Tensor]:
        with torch.device(device):
            model = ClapModel(config, attention="matmul", checkpoint_activations=("audio",)).train()
            return model, torch.zeros(4, config.audio.num_samples), torch.zeros(4, 32, dtype=torch.long)

    def step(model: ClapModel, waveforms: torch.Tensor, ids: torch.Tensor) -> None:
        audio, text, scale = model(waveforms, ids, None)
        (audio * text * scale).sum().backward()

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    model, *inputs = make("meta")
    with fakes:
        model, inputs = model.to_empty(device="cpu"), [torch.empty_like(each, device="cpu") for each in inputs]
    with fakes, trace() as recorded:
        recorded.hold([*model.parameters(), *model.buffers(), *inputs], "there before")
        step(model, *inputs)
    allocated = allocated_peak(lambda: partial(step, *make("cpu")))
    assert recorded.peak_bytes == pytest.approx(allocated, rel=0.05)
