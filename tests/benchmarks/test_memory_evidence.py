"""What the memory command infers and measures, on the micro preset and against an independent count."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import memory_evidence
from clap_ds.config.errors import UserError
from clap_ds.config.model import TextConfig, load_preset
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio)

from transformers import RobertaConfig, RobertaModel  # isort: skip

WriteRun = Callable[..., Path]


@pytest.mark.parametrize("autocast", [False, True])
def test_formula_and_counted_tensors_agree_for_the_published_text_tower(autocast: bool) -> None:
    text = load_preset("htsat_tiny_roberta_base").text
    arguments = {"num_captions": 616, "text_tokens": 77, "autocast": autocast}
    elements = 12 * 768 * 616 * 77
    counted = memory_evidence.counted_bytes(text, **arguments) + memory_evidence.DROPOUT_MASK_BYTES * elements
    formula = elements * memory_evidence.BYTES["autocast" if autocast else "bf16"]
    assert formula < counted < 1.02 * formula


def test_counted_tensors_against_a_real_model() -> None:
    """The same bytes as hooks see on a small `transformers` model with real tensors."""
    text: TextConfig = load_preset("micro").text
    model = RobertaModel(
        RobertaConfig(
            vocab_size=text.vocab_size, max_position_embeddings=text.max_positions, hidden_size=text.hidden_size,
            num_hidden_layers=text.num_layers, num_attention_heads=text.num_heads,
            intermediate_size=text.intermediate_size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            type_vocab_size=1, attn_implementation="sdpa",
        )
    ).bfloat16()  # fmt: skip

    own = {parameter.data_ptr() for parameter in model.parameters()}

    def saved(num_captions: int) -> int:
        held: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            return held.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.full((num_captions, 24), 5))
        return sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in own)

    per_caption = (saved(9) - saved(1)) / 8
    assert memory_evidence.counted_bytes(text, 1, 24, autocast=False) == pytest.approx(per_caption, rel=0.01)


def test_captions_longer_than_the_positions_are_refused(write_run: WriteRun) -> None:
    with pytest.raises(UserError, match="--text_tokens 65: expected 2 to 64"):
        memory_evidence.main(["--deepspeed_config", str(write_run()), "--text_tokens", "65"])


@pytest.mark.end_to_end
def test_measures_every_length(write_run: WriteRun, tmp_path: Path) -> None:
    output = tmp_path / "evidence.md"
    memory_evidence.main(["--deepspeed_config", str(write_run()), "--text_tokens", "8", "32", "--output", str(output)])
    found = json.loads(output.with_suffix(".json").read_text())
    assert [row["text_tokens"] for row in found["measured"]] == [8, 32]
    assert all(row["state"] == "completed" and row["memory_peak_bytes"] > 0 for row in found["measured"])
    short, long = (row["bf16_formula_bytes"] for row in found["inferred"])
    assert long == 4 * short
