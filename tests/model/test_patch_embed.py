"""Compare feature fusion with transformers', which only computes rows of longer clips: forward,
gradients, statistics."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import renamed_checkpoint
from clap_ds.weights.key_mapping import to_names, transformers_names
from tests.model.reference_clap import MICRO_AUDIO, MICRO_TEXT, HfClap, randomise

MICRO = load_preset("micro")
FUSED = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})
IS_LONGER = torch.tensor([True, False, True, True, False])


@pytest.fixture
def reference() -> HfClap:
    model = HfClap(audio={**MICRO_AUDIO, "enable_fusion": True}, text=MICRO_TEXT, joint_dim=32)
    randomise(model.named(), 3)
    for name, buffer in model.named_buffers():
        # Statistics of tokens, not of decibels.
        if "_att" in name and name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 1.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def converted(reference: HfClap, config: ClapConfig = FUSED) -> ClapModel:
    """Return this project's model with the reference's weights."""
    state = {name: tensor.detach().clone() for name, tensor in reference.named().items()}
    if not config.audio.fusion:
        for name in [*state]:
            if "fusion_model" in name or "mel_conv" in name:
                del state[name]
    return renamed_checkpoint(config, state, transformers_names, "HF").build(
        drop_path=0.0, spec_augment=False
    )


def features(is_longer: Tensor = IS_LONGER) -> Tensor:
    """Return (B, 4, frames, bins) in dB; the four channels only differ for longer files."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(is_longer), *FUSED.audio.clip_shape, generator=generator)
    log_mel = -30 + 20 * noise
    return log_mel.where(is_longer[:, None, None, None], log_mel[:, :1])


@pytest.mark.parametrize("training", [False, True])
def test_values_gradients_and_statistics_equal_transformers(reference, training):
    clap = reference.clap
    inputs = features()
    model = converted(reference).train(training)
    clap.audio_model.train(training)
    embeddings = model.encode_audio(inputs)
    pooled = clap.get_audio_features(input_features=inputs, is_longer=IS_LONGER[:, None])
    expected_embeddings = F.normalize(pooled.pooler_output, dim=-1)
    # 8 roundings of 1.
    torch.testing.assert_close(embeddings, expected_embeddings, rtol=0, atol=1e-6)
    probe = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    for output in (embeddings, expected_embeddings):
        (output * probe).sum().backward()
    gradients = to_names(gradients_of(model), transformers_names)
    expected = gradients_of(clap)
    assert gradients.keys() == expected.keys()
    # Gradients of biases before a norm, or of keys, are only rounding errors, of sums as large as
    # others' gradients.
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    rounding = torch.finfo(torch.float32).eps * largest
    for name, gradient in expected.items():
        tolerance = 1e-5 * float(gradient.abs().max()) + 16 * rounding
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=tolerance)
    buffers = dict(clap.named_buffers())
    statistics = to_names(dict(model.named_buffers()), transformers_names)
    for name, value in statistics.items():
        if "running" in name or "num_batches" in name:
            torch.testing.assert_close(value, buffers[name], rtol=1e-6, atol=1e-6)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters()
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


def test_short_files_embed_like_in_model_without_fusion(reference):
    fused, plain = (converted(reference, config).eval() for config in (FUSED, MICRO))
    short = features(torch.zeros(3, dtype=torch.bool))
    expected = plain.encode_audio(short[:, 0])
    torch.testing.assert_close(fused.encode_audio(short), expected, rtol=0, atol=1e-6)
    longer = features()
    difference = fused.encode_audio(longer) - plain.encode_audio(longer[:, 0])
    assert torch.equal(difference.abs().amax(dim=1) > 1e-3, IS_LONGER)
    with pytest.raises(ValueError, match=r"expected \(batch, 4, 101 frames, 16 mel bins\)"):
        fused.encode_audio(longer[:, :3])


def test_every_weight_learns_from_short_clips(reference):
    """Torch's batch norm rejects such a batch: one clip's mean over places is a single value."""
    model = converted(reference).train()
    fusion = model.audio.patch_embed.fusion_model
    over_means = fusion.global_att[2].running_var
    initial = over_means.clone()
    output = model.encode_audio(features(torch.zeros(3, dtype=torch.bool)))
    (output * torch.arange(32)).sum().backward()
    for name, parameter in model.audio.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert model.audio.patch_embed.mel_conv2d.weight.grad.abs().max() > 1e-4
    # A single value has no variance.
    assert torch.equal(over_means, initial)
