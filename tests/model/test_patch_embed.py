"""Compare feature fusion with transformers', which only computes rows of longer clips: forward,
gradients, statistics."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.model.patch_embed import SaveForBackward
from clap_ds.planning.inductor import fused_kernels
from clap_ds.weights.formats import renamed_checkpoint
from clap_ds.weights.key_mapping import to_names, transformers_names
from tests.model.reference_clap import MICRO_AUDIO, MICRO_TEXT, HfClap, clips, randomise

MICRO = load_preset("micro")
FUSED = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})
IS_LONGER = torch.tensor([True, False, True, True, False])


def reference() -> HfClap:
    theirs = HfClap(audio={**MICRO_AUDIO, "enable_fusion": True}, text=MICRO_TEXT, joint_dim=32)
    randomise(theirs.named(), 3)
    for name, buffer in theirs.named_buffers():
        if "_att" in name and name.endswith(
            ("mean", "var")
        ):  # statistics of tokens, not of decibels
            buffer.uniform_(0.5, 1.5)
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return theirs


def ours(theirs: HfClap, config: ClapConfig = FUSED) -> ClapModel:
    state = {name: tensor.detach().clone() for name, tensor in theirs.named().items()}
    if not config.audio.fusion:
        state = {
            name: tensor
            for name, tensor in state.items()
            if "fusion_model" not in name and "mel_conv" not in name
        }
    return renamed_checkpoint(config, state, transformers_names, "HF").build(
        drop_path=0.0, spec_augment=False
    )


def features(is_longer: Tensor = IS_LONGER) -> Tensor:
    """Return (B, 4, frames, bins) in dB; the four channels only differ for longer files."""
    made = -30 + 20 * torch.randn(
        len(is_longer), *FUSED.audio.clip_shape, generator=torch.Generator().manual_seed(0)
    )
    return made.where(is_longer[:, None, None, None], made[:, :1])


@pytest.mark.parametrize("training", [False, True])
def test_equals_transformers_in_values_gradients_and_statistics(training: bool) -> None:
    theirs = reference()
    inputs = features()
    model = ours(theirs).train(training)
    theirs.clap.audio_model.train(training)
    found = model.encode_audio(inputs)
    pooled = theirs.clap.get_audio_features(
        input_features=inputs, is_longer=IS_LONGER[:, None]
    ).pooler_output
    torch.testing.assert_close(
        found, F.normalize(pooled, dim=-1), rtol=0, atol=1e-6
    )  # 8 roundings of 1
    probe = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    for output in (found, F.normalize(pooled, dim=-1)):
        (output * probe).sum().backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    expected = {
        name: each.grad for name, each in theirs.clap.named_parameters() if each.grad is not None
    }
    own = to_names(gradients, transformers_names)
    assert own.keys() == expected.keys()
    # Gradients of biases before a norm, or of keys, are only rounding errors, of sums as large as
    # others' gradients.
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    rounding = torch.finfo(torch.float32).eps * largest
    for name, gradient in expected.items():
        torch.testing.assert_close(
            own[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 16 * rounding
        )
    buffers = dict(theirs.clap.named_buffers())
    statistics = to_names(dict(model.named_buffers()), transformers_names)
    for name, value in statistics.items():
        if "running" in name or "num_batches" in name:
            torch.testing.assert_close(value, buffers[name], rtol=1e-6, atol=1e-6)


def test_clips_and_files_no_longer_are_what_a_model_without_fusion_hears() -> None:
    theirs = reference()
    fused, plain = (ours(theirs, config).eval() for config in (FUSED, MICRO))
    alike = features(torch.zeros(3, dtype=torch.bool))
    torch.testing.assert_close(
        fused.encode_audio(alike), plain.encode_audio(alike[:, 0]), rtol=0, atol=1e-6
    )
    waveforms = clips(2, FUSED.audio.num_samples, seed=0)
    assert torch.equal(fused.encode_audio(waveforms), fused.encode_audio(fused.mel(waveforms)))
    assert not torch.allclose(
        fused.mel(waveforms), plain.mel(waveforms), atol=1
    )  # HTK's filters, not Slaney's
    longer = features()
    mixed = fused.encode_audio(longer) - plain.encode_audio(longer[:, 0])
    assert torch.equal(mixed.abs().amax(dim=1) > 1e-3, IS_LONGER)
    with pytest.raises(ValueError, match=r"expected \(batch, 4, 101 frames, 16 mel bins\)"):
        fused.encode_audio(longer[:, :3])


@pytest.mark.parametrize("num_longer", [0, 1])
def test_every_weight_learns_from_a_batch_of_short_clips(num_longer: int) -> None:
    """Torch's batch norm rejects such a batch: one clip's mean over places is a single value."""
    model = ours(reference()).train()
    norms = (
        model.audio.patch_embed.fusion_model.global_att[2],
        model.audio.patch_embed.fusion_model.local_att[1],
    )
    before = [norm.running_var.clone() for norm in norms]
    output = model.encode_audio(features(torch.arange(3) < num_longer))
    (
        output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ).sum().backward()
    lacking = [
        name
        for name, each in model.audio.named_parameters()
        if each.grad is None or not each.grad.isfinite().all()
    ]
    assert (lacking, bool(output.isfinite().all())) == ([], True)
    assert float(model.audio.patch_embed.mel_conv2d.weight.grad.abs().max()) > 1e-4
    assert [
        torch.equal(norm.running_var, was) for norm, was in zip(norms, before, strict=True)
    ] == [True, False]


def test_stored_tokens_change_no_gradient_and_no_fp32_copy_is_stored() -> None:
    """Compile two layer norms with a residual connection, as they begin the tower."""
    rows = 65_536
    width = 96
    weight = torch.randn(width, width, dtype=torch.bfloat16, requires_grad=True)
    scale, bias = (torch.randn(width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def layers(values: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = store(F.layer_norm(F.linear(values, weight), (width,), scale, bias))
        return tokens + F.linear(F.layer_norm(tokens, (width,), scale, bias), weight)

    compiled = torch.compile(layers, backend="aot_eager_decomp_partition")
    values = torch.randn(64, width, dtype=torch.bfloat16)
    gradients = []
    for store in (torch.clone, SaveForBackward.apply):
        gradients.append(
            torch.autograd.grad(
                compiled(values, store).float().square().sum(), (weight, scale, bias)
            )
        )
    for plain, stored in zip(*gradients, strict=True):
        assert torch.equal(plain, stored)
    kernels = fused_kernels(
        layers, torch.empty(rows, width, dtype=torch.bfloat16), SaveForBackward.apply
    )
    backward = sum(num_bytes for is_backward, num_bytes in kernels if is_backward) / (
        rows * width * 2
    )
    # Two norms each read their input and gradients (3 and 2 in all) and write a gradient. Older
    # schedulers fuse less.
    assert backward < 9 or torch.__version__ < "2.13"
