from collections.abc import Callable
from itertools import combinations, islice
from typing import Any

import pytest
import torch

from clap_ds.data.batch import Batch
from tests.data.conftest import OpenSource

Draw = Callable[..., list[Batch]]


@pytest.fixture
def draw(open_source: OpenSource) -> Draw:
    """Return a function that draws the first batches of a source."""
    return lambda count=1, **settings: list(
        islice(open_source(**{"micro_batch": 6, **settings}), count)
    )


def are_equal(batch: Batch, expected: Batch) -> bool:
    return all(map(torch.equal, batch.tensors(), expected.tensors()))


def test_synthetic_batches_repeat_and_differ_by_seed_and_rank(draw):
    batches = draw(4, num_batches=3)
    assert are_equal(batches[0], batches.pop())
    assert all(map(are_equal, batches, draw(3, num_batches=3, placement="device")))
    for rank, seed in ((1, 0), (0, 1), (1, 2), (2, 1)):
        batches += draw(rank=rank, seed=seed)
    for batch, other in combinations(batches, 2):
        assert (batch.audio != other.audio).any(1).all()


def test_synthetic_captions_have_frames_of_roberta_and_lengths_of_histogram(draw, micro):
    lengths = {"3": 1.0, "8": 9.0, "12": 0.0}
    (batch,) = draw(micro_batch=2000, caption_lengths=lengths)
    assert batch.input_ids.shape == batch.attention_mask.shape == (2000, 12)
    assert batch.input_ids.max() < micro.text.vocab_size
    is_short = batch.attention_mask.sum(1) == 3
    assert float(is_short.double().mean()) == pytest.approx(0.1, abs=5 * 0.0067)
    assert batch.num_tokens == 3 * is_short.sum() + 8 * (~is_short).sum()
    # <s>, a word, </s>, padding
    assert (batch.input_ids[is_short] == 1).sum() == 9 * is_short.sum()
    assert batch.input_ids[is_short][0, [0, 2]].tolist() == [0, 2]


def test_workers_make_same_batches_and_resume(draw, open_source, monkeypatch):
    # pieces of 4 and 2 clips
    monkeypatch.setattr("clap_ds.data.synthetic.PIECE_SIZE", 4)
    lengths = {"3": 1.0, "12": 1.0}
    settings: dict[str, Any] = {"num_batches": 3, "caption_lengths": lengths, "micro_batch": 6}
    with open_source(num_workers=2, **settings) as source:
        batches = [next(source) for _ in range(4)]
        state = source.state()
    with open_source(num_workers=2, states=[state], **settings) as source:
        batches += [next(source) for _ in range(3)]
    assert all(map(are_equal, batches, draw(7, **settings)))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_peek_takes_no_batch(open_source, device):
    """On a GPU the next batch is copied during the current step."""
    with open_source(num_batches=3, micro_batch=6, device=torch.device(device)) as source:
        for number in range(3):
            peeked = source.peek()
            assert source.state()["batches"] == number
            batch = next(source)
            assert source.state()["batches"] == number + 1
            assert are_equal(batch, peeked)
            assert batch.device.type == device


@pytest.mark.gpu
@needs_gpu
def test_batches_copied_ahead_are_complete(open_source):
    """With a busy compute stream, a missing wait or memory reused too early would give wrong rows
    of large batches."""
    device = torch.device("cuda")
    settings = {"num_batches": 6, "micro_batch": 20_000, "device": device}
    with open_source(placement="device", **settings) as source:
        expected = [next(source).audio.sum(1) for _ in range(6)]
    work = torch.rand(4096, 4096, device=device)
    sums = []
    with open_source(**settings) as source:
        for _ in range(6):
            batch = next(source)
            for _ in range(20):
                work = (work @ work).clamp_(0, 1)
            sums.append(batch.audio.sum(1))
            del batch
    assert all(map(torch.equal, sums, expected))
