from collections.abc import Callable
from itertools import combinations, islice

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.data.batch import Batch
from tests.data.conftest import OpenSource

TEXT_TOKENS = 12

Draw = Callable[..., list[Batch]]


@pytest.fixture
def draw(open_source: OpenSource) -> Draw:
    """The first batches of a source."""
    return lambda count=1, **settings: list(islice(open_source(**{"micro_batch": 6, **settings}), count))


def test_batches_are_the_same_for_a_seed_and_a_rank_alone(draw: Draw) -> None:
    """Wherever they are placed; batches take turns."""
    *batches, again = draw(4, num_batches=3)
    for first, second in zip(batches, draw(3, num_batches=3, placement="device"), strict=True):
        assert all(torch.equal(*pair) for pair in zip(first.tensors(), second.tensors(), strict=True))
    assert torch.equal(batches[0].audio, again.audio)
    batches += [draw(rank=rank, seed=seed)[0] for rank, seed in [(1, 0), (0, 1), (1, 2), (2, 1)]]
    for first, second in combinations(batches, 2):
        pairs = zip(first.tensors()[:2], second.tensors()[:2], strict=True)
        assert all(bool((ours != theirs).any(1).all()) for ours, theirs in pairs)


def test_waveforms_are_uniform_noise(draw: Draw) -> None:
    waveforms = draw(micro_batch=100)[0].audio
    assert (waveforms.shape, waveforms.dtype) == ((100, 480), torch.float32)
    assert abs(waveforms.mean()) < 0.02
    assert abs(waveforms.std() - 3**-0.5) < 0.01
    assert -1 <= waveforms.min() < -0.99
    assert 0.99 < waveforms.max() <= 1


@pytest.mark.parametrize(
    ("setting", "lengths"),
    [(None, {12}), (2, {2}), (9, {9}), ({"2": 1.0, "12": 1.0, "7": 2.0}, {2, 7, 12}), ({"5": 0.2, "6": 0.0}, {5})],
)
def test_captions_are_framed_as_roberta_frames_them(
    draw: Draw, micro: ClapConfig, setting: object, lengths: set[int]
) -> None:
    (batch,) = draw(micro_batch=50, caption_lengths=setting)
    assert batch.input_ids.shape == batch.attention_mask.shape == (50, TEXT_TOKENS)
    assert batch.input_ids.max() < micro.text.vocab_size
    assert set(batch.attention_mask.sum(1).tolist()) == lengths
    assert batch.num_tokens == batch.attention_mask.sum()
    for ids, mask in zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
        length = sum(mask)
        assert mask == [1] * length + [0] * (TEXT_TOKENS - length)
        assert (ids[0], ids[length - 1]) == (0, 2)
        assert all(token > 3 for token in ids[1 : length - 1])
        assert ids[length:] == [1] * (TEXT_TOKENS - length)


def test_lengths_follow_the_histogram(draw: Draw) -> None:
    (batch,) = draw(micro_batch=4000, caption_lengths={"3": 1.0, "8": 6.0, "12": 3.0})
    for length, share in ((3, 0.1), (8, 0.6), (12, 0.3)):
        found = (batch.attention_mask.sum(1) == length).double().mean()
        assert abs(found - share) < 5 * (share * (1 - share) / 4000) ** 0.5  # 5 sigma


@pytest.mark.parametrize(
    "lengths",
    [1, 13, *({text: 1.0} for text in ("1", "13", "seven", "7.5", "-7")), {}, {"7": 0.0}, {"7": float("inf")}],
)
def test_impossible_lengths_are_refused(draw: Draw, lengths: object) -> None:
    with pytest.raises(ValueError, match=r"clap\.data\.caption_lengths"):
        draw(caption_lengths=lengths)
