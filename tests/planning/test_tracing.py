"""Test the tracer against the model's closed-form FLOPs, sizes computed by hand, and a real run of
the same code."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_components
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import LogMel
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.tracing import Recorded

BATCH = 3
TOKENS = 20


def flops(recorded: Recorded, part: str | None = None, backward: bool | None = None) -> int:
    """Sum FLOPs of a part and direction."""
    own = [
        each
        for each in recorded.operations
        if part in (None, each.part) and backward in (None, each.backward)
    ]
    return sum(each.flops for each in own)


def _traced(config: ClapConfig, kernel: str) -> Recorded:
    """Trace the model's forward and backward pass in bf16, as on CUDA."""
    with torch.device("meta"):
        model = ClapModel(config, attention=kernel).train().bfloat16()
    recorded = Recorded(
        audio=[model.mel, model.audio, model.audio_projection],
        text=[model.text, model.text_projection],
    )
    with like_cuda(), FakeTensorMode(allow_non_fake_inputs=True), recorded:
        model.to_empty(device="cpu")
        waveforms = torch.empty(BATCH, config.audio.num_samples)
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        audio, text, scale = model(waveforms, ids, None)
        (audio * text * scale).sum().backward()
    return recorded


@pytest.mark.parametrize(
    ("preset", "kernel"), [("micro", "matmul"), ("micro", "sdpa"), ("demo", "triton")]
)
def test_flops_of_the_model_are_the_closed_forms(preset: str, kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    recorded = _traced(load_preset(preset), kernel)
    forward = forward_components(load_preset(preset), TextLengths.fixed(TOKENS), "model")
    frames = load_preset(preset).audio.num_frames
    padded = forward["stretch"] * (-frames % 8) / frames  # on CUDA to a multiple of 8 frames
    mel = LogMel(load_preset(preset).audio)
    unused = forward["mel"] * (
        1 - mel.num_used / mel.mel_filters.shape[1]
    )  # frequencies without a filter, left out on CUDA
    for part, more in (("audio", padded - unused), ("text", 0)):
        expected = BATCH * (forward[f"{part}_tower"] + more)
        assert flops(recorded, part=part, backward=False) == pytest.approx(expected, abs=1)
    # Two products backward per forward product; none for the spectrogram, one for the stretch,
    # which has no weights. Fused attention recomputes the scores.
    backward = (
        2 * forward["forward"] - 2 * (forward["fft"] + forward["mel"]) - forward["stretch"] + padded
    )
    backward += 0.5 * forward["text_attention"] + 0.5 * forward["window_attention"] * (
        kernel != "matmul"
    )
    assert flops(recorded, backward=True) == pytest.approx(BATCH * backward, rel=1e-12)


def test_bytes_and_kernels_of_operations() -> None:
    with FakeTensorMode(), Recorded() as recorded:
        a = torch.empty(6, 4)
        b = torch.empty(4, 5, dtype=torch.float32)
        _ = a @ b.T.T
        _ = a.expand(7, 6, 4) + a
        a.mul_(a)
        a.transpose_(0, 1)
        torch.empty(0, 3).add_(1)
        torch.empty(6, 4).copy_(a.T)
    moved = {op.name: op.bytes_moved for op in recorded.operations}
    assert moved["aten.mm"] == 4 * (6 * 4 + 4 * 5 + 6 * 5)
    assert moved["aten.add"] == 4 * (2 * 6 * 4 + 7 * 6 * 4)  # expanded memory counts once
    assert (
        moved["aten.mul_"] == moved["aten.copy_"] == 4 * 2 * 6 * 4
    )  # what a copy writes to isn't read
    assert [name for name, size in moved.items() if size] == [
        "aten.mm",
        "aten.add",
        "aten.mul_",
        "aten.copy_",
    ]


def test_the_backward_pass_is_of_the_part_that_it_differentiates() -> None:
    with FakeTensorMode(), Recorded() as recorded:
        x = torch.empty(8, 8, requires_grad=True)
        with recorded.part("inner"):
            y = checkpoint(
                nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)),
                x,
                use_reentrant=False,
            )
        with recorded.part("outer"):
            z = torch.mm(y, y)
        z.sum().backward()
    product = 2 * 8**3
    assert flops(recorded, part="inner", backward=False) == 2 * product
    # Two for each of them, and the first again; the last result isn't needed.
    assert flops(recorded, part="inner", backward=True) == 5 * product
    assert flops(recorded, part="outer", backward=True) == 2 * product
    assert flops(recorded, part="other") == 0
