"""Test the encoder for mteb: embeddings of rows, and a task of mteb if it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from clap_ds.inference.model import Clap
from clap_ds.inference.mteb_encoder import MtebEncoder
from tests import needs
from tests.inference.conftest import noise

SOUNDS = [{"array": noise(0.3 + 0.4 * n)[0] / (n + 1), "sampling_rate": 48000} for n in range(4)]
TEXTS = ["a loud tone", "a quiet tone", "a click", "a loud tone"]


def test_rows_of_audio_text_or_both_are_embedded(clap: Clap, clap_folder: Path) -> None:
    encoder = MtebEncoder(str(clap_folder), device="cpu")
    audio = clap.embed_audio(SOUNDS, batch_size=3)
    text = clap.embed_text(TEXTS, batch_size=3)
    audio_rows: Any = [{"audio": sound} for sound in SOUNDS]
    text_rows: Any = [{"text": caption} for caption in TEXTS]
    both = [{**sound, **caption} for sound, caption in zip(audio_rows, text_rows, strict=True)]
    for rows, expected in ((audio_rows, audio), (text_rows, text), (both, audio + text)):
        vectors = encoder.encode(DataLoader(rows, batch_size=3), batch_size=3, hf_split="test")
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(encoder.similarity(2 * audio, text), audio @ text.T, atol=1e-6)
    cosines = encoder.similarity_pairwise(torch.tensor(audio), 3 * text)
    np.testing.assert_allclose(cosines, (audio * text).sum(1), atol=1e-6)


def test_zero_shot_task_of_mteb_is_scored(clap: Clap, clap_folder: Path) -> None:
    needs.package("mteb", "mteb")
    import mteb
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification

    candidates = TEXTS[:3]
    predicted = (clap.embed_audio(SOUNDS) @ clap.embed_text(candidates).T).argmax(1)
    # One label of four is the one that the model predicts.
    labels = ((predicted + np.array([0, 1, 1, 1])) % 3).tolist()

    class Tiny(AbsTaskZeroShotClassification):
        input_column_name = "audio"
        metadata = mteb.TaskMetadata(
            name="Tiny", type="AudioZeroshotClassification", modalities=["audio", "text"], eval_splits=["test"],
            main_score="accuracy", eval_langs=["eng-Latn"], description="x", category="a2t",
            dataset={"path": "x", "revision": "1"},
        )  # fmt: skip

        def load_data(self, **_: Any) -> None:
            split = Dataset.from_dict({"audio": SOUNDS, "label": labels})
            self.dataset = DatasetDict({"test": split})
            self.data_loaded = True

        def get_candidate_labels(self) -> list[str]:
            return candidates

    result = mteb.evaluate(MtebEncoder(str(clap_folder)), Tiny(), cache=None)
    (scores,) = result.task_results[0].scores["test"]
    assert scores["accuracy"] == 0.25
