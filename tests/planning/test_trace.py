"""The tracer against the closed form of the model's FLOPs, sizes worked out by hand, and a real run of the same code."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_components
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import Kernel
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.trace import Recorded, trace

BATCH, TOKENS = 3, 20


def _traced(config: ClapConfig, kernel: Kernel) -> Recorded:
    """Forward and backward pass of the model alone, in bf16, as on CUDA."""
    with torch.device("meta"):
        model = ClapModel(config, attention=kernel).train().bfloat16()
    parts = {"audio": [model.mel, model.audio, model.audio_projection], "text": [model.text, model.text_projection]}
    with like_cuda(), FakeTensorMode(allow_non_fake_inputs=True), trace(parts) as recorded:
        model.to_empty(device="cpu")
        waveforms, ids = torch.empty(BATCH, config.audio.num_samples), torch.zeros(BATCH, TOKENS, dtype=torch.long)
        audio, text, scale = model(waveforms, ids, None)
        (audio * text * scale).sum().backward()
    return recorded


@pytest.mark.parametrize(("preset", "kernel"), [("micro", "matmul"), ("micro", "sdpa"), ("demo", "triton")])
def test_flops_of_the_model_are_the_closed_forms(preset: str, kernel: Kernel) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    recorded, forward = _traced(load_preset(preset), kernel), forward_components(
        load_preset(preset), TextLengths.fixed(TOKENS), "model"
    )  # fmt: skip
    for part in ("audio", "text"):
        expected = BATCH * forward[f"{part}_tower"]
        assert recorded.total("flops", part=part, backward=False) == pytest.approx(expected, abs=1)
    # Two products backward for each forward; none for the spectrogram, one through the stretch, which isn't learned. Fused
    # attention computes the scores again.
    backward = 2 * forward["forward"] - 2 * (forward["fft"] + forward["mel"]) - forward["stretch"]
    backward += 0.5 * forward["text_attention"] + 0.5 * forward["window_attention"] * (kernel != "matmul")
    assert recorded.total("flops", backward=True) == pytest.approx(BATCH * backward, rel=1e-12)


def _work() -> None:
    first = torch.ones(1000)
    second = first * 2  # 8,000 bytes with the first
    view = second.view(10, 100).T
    del first, second  # the view holds on to its storage
    view.sum().add_(1)
    third = torch.ones(1500)  # 4,000 + 6,000
    third.add_(1)


def test_memory_is_that_of_live_storages_and_the_same_without_fakes() -> None:
    with trace() as real:
        _work()
    with FakeTensorMode(), trace() as fake:
        _work()
    assert fake.operations == real.operations
    assert fake.peak_bytes == real.peak_bytes == 4 * (1000 + 1500)
    assert fake.live_bytes == real.live_bytes == 0


def _sum(places: tuple[tuple[int, int], ...]) -> int:
    return sum(num_bytes for _, num_bytes in places)


def test_bytes_and_kernels_of_operations() -> None:
    with FakeTensorMode(), trace() as recorded:
        a, b = torch.empty(6, 4), torch.empty(4, 5, dtype=torch.float32)
        _ = a @ b.T.T
        _ = a.expand(7, 6, 4) + a
        a.mul_(a)
        a.transpose_(0, 1)
        torch.empty(0, 3).add_(1)
        torch.empty(6, 4).copy_(a.T)
    found = {op.name: (op.launches, _sum(op.read), _sum(op.written)) for op in recorded.operations}
    assert found["aten.mm"] == (True, 4 * (6 * 4 + 4 * 5), 4 * 6 * 5)
    assert found["aten.add"] == (True, 4 * 2 * 6 * 4, 4 * 7 * 6 * 4)  # what is expanded lies there once
    assert found["aten.mul_"] == (True, 4 * 6 * 4, 4 * 6 * 4)
    assert found["aten.copy_"] == (True, 4 * 6 * 4, 4 * 6 * 4)  # what it writes to isn't read
    assert found["aten.add_"] == (False, 0, 0)
    assert not any(found[name][0] for name in ("aten.empty", "aten.permute", "aten.expand", "aten.transpose_"))
    assert recorded.total("launches") == 4


def test_shapes_are_those_that_torchs_profiler_records() -> None:
    def work() -> None:
        rows = torch.ones(6, 4, requires_grad=True)
        normed = nn.functional.layer_norm(torch.cat([rows @ torch.ones(4, 5), torch.ones(2, 5)]) + 1, (5,))
        normed.index_add(0, torch.tensor([1]), source=torch.ones(1, 5)).sum().backward()

    with trace() as recorded:
        work()
    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    found: dict[str, list[tuple[tuple[int, ...], ...]]] = {}
    for event in profile.events():
        found.setdefault(event.name, []).append(tuple(tuple(shape) for shape in event.input_shapes if shape))
    kinds = ("mm", "cat", "add", "index_add", "native_layer_norm", "native_layer_norm_backward")
    for kind in kinds:
        assert [op.shapes for op in recorded.operations if op.name == f"aten.{kind}"] == found[f"aten::{kind}"], kind


def test_the_backward_pass_is_of_the_part_that_it_differentiates() -> None:
    with FakeTensorMode(), trace() as recorded:
        x = torch.empty(8, 8, requires_grad=True)
        with recorded.part("inner"):
            y = checkpoint(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)), x, use_reentrant=False)
        with recorded.part("outer"):
            z = torch.mm(y, y)
        z.sum().backward()
    product = 2 * 8**3
    assert recorded.total("flops", part="inner", backward=False) == 2 * product
    # Two for each of them, and the first once more; the last result is not needed again.
    assert recorded.total("flops", part="inner", backward=True) == 5 * product
    assert recorded.total("flops", part="outer", backward=True) == 2 * product
    assert recorded.total("flops", part="other") == 0
