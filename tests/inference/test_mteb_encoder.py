"""Test the encoder for mteb: embeddings of rows, and a task of mteb if it is installed."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from clap_ds.inference.mteb_encoder import MtebEncoder
from tests import needs
from tests.inference.conftest import noise

SOUNDS = [{"array": noise(0.3 + 0.4 * n)[0] / (n + 1), "sampling_rate": 48000} for n in range(4)]
TEXTS = ["a loud tone", "a quiet tone", "a click", "a loud tone"]


def test_rows_of_audio_text_or_both_are_embedded(clap, clap_folder):
    encoder = MtebEncoder(str(clap_folder), device="cpu")
    audio = clap.embed_audio(SOUNDS, batch_size=3)
    text = clap.embed_text(TEXTS, batch_size=3)
    audio_rows: Any = [{"audio": sound} for sound in SOUNDS]
    text_rows: Any = [{"text": caption} for caption in TEXTS]
    both = [{**sound, **caption} for sound, caption in zip(audio_rows, text_rows, strict=True)]
    for rows, expected in ((audio_rows, audio), (text_rows, text), (both, audio + text)):
        vectors = encoder.encode(DataLoader(rows, batch_size=3), batch_size=3, hf_split="test")
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_encoder_follows_mtebs_protocol(clap, clap_folder):
    needs.package("mteb", "mteb")
    import mteb

    encoder = MtebEncoder(str(clap_folder), device="cpu")
    assert isinstance(encoder, mteb.EncoderProtocol)
    assert encoder.mteb_model_meta.revision == clap.fingerprint
    text = clap.embed_text(TEXTS)
    np.testing.assert_allclose(encoder.similarity(2 * text, text), text @ text.T, atol=1e-6)
    cosines = encoder.similarity_pairwise(torch.tensor(text), 3 * text)
    np.testing.assert_allclose(cosines, np.ones(len(TEXTS)), atol=1e-6)
