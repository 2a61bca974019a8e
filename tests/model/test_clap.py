"""Compare the whole model with HF models, LAION's tiny at full size: embeddings, gradients,
precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401
from clap_ds.weights.formats import renamed_checkpoint
from clap_ds.weights.key_mapping import transformers_names
from tests.model.reference_clap import (
    MICRO_AUDIO,
    MICRO_TEXT,
    HfClap,
    captions,
    clips,
    no_initialisation,
    randomise,
)

import transformers  # isort: skip


def reference_features(waveforms: Tensor, preset: str) -> Tensor:
    """Return (B, 1, frames, mel bins) from HF's feature extractor."""
    config = load_preset(preset).audio
    extractor = transformers.ClapFeatureExtractor(
        config.mel_bins,
        sampling_rate=48000,
        hop_length=480,
        fft_window_size=1024,
        frequency_min=50,
        frequency_max=14000,
        max_length_s=config.num_samples // 48000,
        truncation="rand_trunc",
    )
    batch = extractor(list(waveforms.numpy()), sampling_rate=48000, return_tensors="pt")
    return batch["input_features"].float()


# LAION's tiny at full size, and the CPU's kernel
@pytest.mark.parametrize(
    ("preset", "attention", "sizes"),
    [
        ("clap_htsat_tiny_roberta_base", "sdpa", {"audio": {}, "text": {}, "joint_dim": 512}),
        ("micro", "matmul", {"audio": MICRO_AUDIO, "text": MICRO_TEXT, "joint_dim": 32}),
    ],
)
def test_embeddings_and_gradients_equal_transformers(preset, attention, sizes):
    with no_initialisation():
        ours = ClapModel(load_preset(preset), attention=attention).eval()
        reference = HfClap(**sizes)
    weights = reference.named()
    randomise(weights, 0)
    named = {name: tensor.detach() for name, tensor in weights.items()}
    renamed_checkpoint(ours.config, named, transformers_names, "the reference").load_into(ours)
    waveforms = clips(2, ours.config.audio.num_samples, 0)
    input_ids, mask = captions(2, 24, ours.config.text.vocab_size, 0)

    audio, text, scale = ours(waveforms, input_ids, mask)
    expected_audio = reference.encode_audio(reference_features(waveforms, preset))
    expected_text = reference.encode_text(input_ids, mask)
    assert (audio - expected_audio).abs().max() < 1e-4
    assert (text - expected_text).abs().max() < 1e-4
    torch.testing.assert_close(scale, weights["logit_scale_a"].detach().exp().reshape(1))

    probe = torch.Generator().manual_seed(100)
    probe_audio = torch.randn(audio.shape, generator=probe)
    probe_text = torch.randn(text.shape, generator=probe)
    ((audio * probe_audio).sum() + (text * probe_text).sum()).backward()
    ((expected_audio * probe_audio).sum() + (expected_text * probe_text).sum()).backward()
    compare_gradients(ours, weights)


def compare_gradients(ours: ClapModel, weights: dict[str, Tensor]) -> None:
    """Check that every gradient is within 1e-4 of its norm, except the logit scale's, on which
    embeddings don't depend.

    fp32 rounding (6e-8) grows to 1e-5 in the queries and keys of the deepest text layers. Softmax
    doesn't depend on RoBERTa's key biases, so that their gradients are rounding errors, which are
    compared with the gradients of the key weights.
    """

    def expected(key: str) -> Tensor:
        return torch.cat([weights[name].grad for name in transformers_names(key)])

    for key, parameter in ours.named_parameters():
        if key == "logit_scale":
            continue
        error = (parameter.grad - expected(key)).norm()
        size = expected(key.replace("self.key.bias", "self.key.weight")).norm()
        assert size > 0, key
        assert error <= 1e-4 * size, f"{key}: off by {error}, gradient {size}"


def micro(**options: Any) -> tuple[ClapModel, tuple[Tensor, ...]]:
    """Return a random micro model and a batch of 3 for it."""
    torch.manual_seed(0)
    model = ClapModel(load_preset("micro"), **options)
    model.audio.batch_norm.running_mean.fill_(-30)
    model.audio.batch_norm.running_var.fill_(200)
    return model, (clips(3, model.config.audio.num_samples, 0), *captions(3, 20, 512, 0))


def test_log_mel_features_embed_like_their_waveforms():
    model, (waveforms, *_) = micro()
    features = model.eval().mel(waveforms)
    expected = model.encode_audio(waveforms)
    assert torch.equal(model.encode_audio(features), expected)
    # Half precision, as in mel shards.
    assert (model.encode_audio(features.half().float()) * expected).sum(1).min() > 0.9999
    with pytest.raises(ValueError, match=r"expected \(batch, 101 frames, 16 mel"):
        model.encode_audio(torch.zeros(3, 100, 16))
    with pytest.raises(ValueError, match=r"expected \(batch, 48000\) samples"):
        model.encode_audio(torch.zeros(48000))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_close_to_fp32_with_few_parameters_in_fp32(autocast):
    model, batch = micro(drop_path=0.0, text_dropout=0.0, spec_augment=False)
    *expected, _ = model(*batch)
    if not autocast:
        model.to(torch.bfloat16)
        fp32 = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
        assert fp32 == {"logit_scale", "audio.batch_norm.weight", "audio.batch_norm.bias"}
        assert model.audio.batch_norm.running_var.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        audio, text, scale = model(*batch)
    # Unit vectors of 32 numbers of about 0.18; bf16 has 3 digits over a dozen layers.
    for features, exact in zip((audio, text), expected, strict=True):
        assert features.dtype == torch.float32
        assert (features * exact).sum(1).min() > 0.999
        assert not torch.equal(features, exact), "the 16-bit path was not taken"
    (audio @ text.T * scale).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
