"""Test the tracer against the model's closed-form FLOPs, sizes computed by hand, and a real run of
the same code."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_components
from clap_ds.model.clap import ClapModel
from clap_ds.planning.cuda_operations import cuda_semantics
from clap_ds.planning.tracing import TraceRecorder

BATCH = 3
TOKENS = 20


def sum_flops(
    recorder: TraceRecorder, part: str | None = None, backward: bool | None = None
) -> int:
    """Sum FLOPs of a part and direction, by default of all."""
    return sum(
        operation.flops
        for operation in recorder.operations
        if part in (None, operation.part) and backward in (None, operation.backward)
    )


@pytest.mark.parametrize(
    ("preset", "kernel"), [("micro", "matmul"), ("micro", "sdpa"), ("demo", "triton")]
)
def test_models_flops_equal_the_closed_form(preset, kernel):
    if kernel == "triton":
        pytest.importorskip("triton")
    config = load_preset(preset)
    with torch.device("meta"):
        model = ClapModel(config, attention=kernel).train().bfloat16()
    recorder = TraceRecorder(
        audio=[model.mel, model.audio, model.audio_projection],
        text=[model.text, model.text_projection],
    )
    with cuda_semantics(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model.to_empty(device="cpu")
        waveforms = torch.empty(BATCH, config.audio.num_samples)
        audio, text, scale = model(waveforms, torch.zeros(BATCH, TOKENS, dtype=torch.long), None)
        (audio * text * scale).sum().backward()

    forward = forward_components(config, TextLengths.fixed(TOKENS), "model")
    # CUDA pads the stretch to a multiple of 8 frames, and omits frequencies without a filter.
    num_frames = config.audio.num_frames
    padding = forward["stretch"] * (-num_frames % 8) / num_frames
    omitted = forward["mel"] * (1 - model.mel.num_used / model.mel.mel_filters.shape[1])
    for part, difference in (("audio", padding - omitted), ("text", 0)):
        expected = BATCH * (forward[f"{part}_tower"] + difference)
        assert sum_flops(recorder, part, backward=False) == pytest.approx(expected, abs=1)
    # Two products backward per forward product; none for the spectrogram, one for the stretch,
    # which has no weights. Fused attention recomputes the scores.
    backward = 2 * (forward["forward"] - forward["fft"] - forward["mel"])
    backward += padding - forward["stretch"] + 0.5 * forward["text_attention"]
    if kernel != "matmul":
        backward += 0.5 * forward["window_attention"]
    assert sum_flops(recorder, backward=True) == pytest.approx(BATCH * backward, rel=1e-12)


def test_bytes_are_those_of_distinct_elements():
    with FakeTensorMode(), TraceRecorder() as recorder:
        a = torch.empty(6, 4)
        b = torch.empty(4, 5)
        _ = a @ b.T.T
        # Expanded memory counts once.
        _ = a.expand(7, 6, 4) + a
        a.mul_(a)
        a.transpose_(0, 1)
        torch.empty(0, 3).add_(1)
        # A copy's target isn't read.
        torch.empty(6, 4).copy_(a.T)
    bytes_moved = {op.name: op.bytes_moved for op in recorder.operations if op.bytes_moved}
    assert bytes_moved == {
        "aten.mm": 4 * (6 * 4 + 4 * 5 + 6 * 5),
        "aten.add": 4 * (2 * 6 * 4 + 7 * 6 * 4),
        "aten.mul_": 4 * 2 * 6 * 4,
        "aten.copy_": 4 * 2 * 6 * 4,
    }


def test_backward_pass_belongs_to_the_differentiated_part():
    with FakeTensorMode(), TraceRecorder() as recorder:
        x = torch.empty(8, 8, requires_grad=True)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
        with recorder.part("inner"):
            y = checkpoint(layers, x, use_reentrant=False)
        with recorder.part("outer"):
            z = torch.mm(y, y)
        z.sum().backward()
    product = 2 * 8**3
    assert sum_flops(recorder, "inner", backward=False) == 2 * product
    # Two for each of them, and the first again; the last result isn't needed.
    assert sum_flops(recorder, "inner", backward=True) == 5 * product
    assert sum_flops(recorder, "outer", backward=True) == 2 * product
    assert sum_flops(recorder, "other") == 0
