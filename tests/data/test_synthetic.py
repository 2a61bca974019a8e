from __future__ import annotations

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import SyntheticData
from clap_ds.data.batch import Batch, build_batches

TEXT_TOKENS = 20


def batches(
    model: ClapConfig, count: int, *, rank: int = 0, seed: int = 0, micro_batch: int = 6, **settings: object
) -> list[Batch]:
    data = SyntheticData.model_validate({"source": "synthetic", **settings})
    with build_batches(
        data,
        model=model,
        text_tokens=TEXT_TOKENS,
        micro_batch=micro_batch,
        rank=rank,
        world_size=4,
        seed=seed,
        device=torch.device("cpu"),
    ) as source:
        return [next(source) for _ in range(count)]


def differ_everywhere(first: Batch, second: Batch) -> bool:
    rows_differ = (first.waveforms != second.waveforms).any(1).all() and (first.input_ids != second.input_ids).any(
        1
    ).all()
    return bool(rows_differ)


def test_same_seed_same_batches(micro: ClapConfig) -> None:
    for first, second in zip(batches(micro, 3), batches(micro, 3), strict=True):
        assert torch.equal(first.waveforms, second.waveforms)
        assert torch.equal(first.input_ids, second.input_ids)


@pytest.mark.parametrize("other", [{"rank": 1}, {"seed": 1}, {"rank": 3, "seed": 5}])
def test_ranks_and_seeds_see_different_batches(micro: ClapConfig, other: dict[str, int]) -> None:
    assert differ_everywhere(batches(micro, 1)[0], batches(micro, 1, **other)[0])


def test_rank_and_seed_are_not_interchangeable(micro: ClapConfig) -> None:
    assert differ_everywhere(batches(micro, 1, rank=1, seed=2)[0], batches(micro, 1, rank=2, seed=1)[0])


def test_distinct_batches_take_turns(micro: ClapConfig) -> None:
    first, second, third, again = batches(micro, 4, num_batches=3)
    assert differ_everywhere(first, second)
    assert differ_everywhere(second, third)
    assert torch.equal(first.waveforms, again.waveforms)


def test_waveforms_are_uniform_noise(micro: ClapConfig) -> None:
    waveforms = batches(micro, 1, micro_batch=100)[0].waveforms
    assert waveforms.abs().max() <= 1
    assert abs(waveforms.mean()) < 0.02
    assert abs(waveforms.std() - 3**-0.5) < 0.01
    assert waveforms.min() < -0.99
    assert waveforms.max() > 0.99


@pytest.mark.parametrize("lengths", [None, 2, 13, {"2": 1.0, "20": 1.0, "7": 2.0}])
def test_captions_are_framed_as_roberta_frames_them(micro: ClapConfig, lengths: object) -> None:
    batch = batches(micro, 1, micro_batch=50, caption_lengths=lengths)[0]
    assert batch.input_ids.max() < micro.text.vocab_size
    for ids, mask in zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
        length = sum(mask)
        assert mask == [1] * length + [0] * (TEXT_TOKENS - length)
        assert ids[0] == 0
        assert ids[length - 1] == 2
        assert all(token > 3 for token in ids[1 : length - 1])
        assert ids[length:] == [1] * (TEXT_TOKENS - length)


@pytest.mark.parametrize(
    ("setting", "length"), [(None, TEXT_TOKENS), (9, 9), ({"5": 0.2}, 5), ({"5": 1.0, "6": 0.0}, 5)]
)
def test_fixed_lengths(micro: ClapConfig, setting: object, length: int) -> None:
    batch = batches(micro, 1, caption_lengths=setting)[0]
    assert batch.attention_mask.sum(1).tolist() == [length] * 6
    assert batch.num_tokens == 6 * length


def test_lengths_follow_the_histogram(micro: ClapConfig) -> None:
    weights = {"3": 1.0, "8": 6.0, "20": 3.0}
    lengths = batches(micro, 1, micro_batch=4000, caption_lengths=weights)[0].attention_mask.sum(1)
    assert set(lengths.tolist()) == {3, 8, 20}
    for text, weight in weights.items():
        share = weight / 10
        five_sigma = 5 * (share * (1 - share) / 4000) ** 0.5
        assert abs((lengths == int(text)).double().mean() - share) < five_sigma


@pytest.mark.parametrize(
    "lengths",
    [
        1,
        TEXT_TOKENS + 1,
        {},
        {"1": 1.0},
        {"21": 1.0},
        {"7": 0.0},
        {"seven": 1.0},
        {"7.5": 1.0},
        {"-7": 1.0},
        {"7": float("inf")},
    ],
)
def test_impossible_lengths_are_refused(micro: ClapConfig, lengths: object) -> None:
    with pytest.raises(ValueError, match=r"clap\.data\.caption_lengths"):
        batches(micro, 1, caption_lengths=lengths)


def test_device_placement_gives_the_same_data(micro: ClapConfig) -> None:
    on_host, on_device = batches(micro, 1, placement="host")[0], batches(micro, 1, placement="device")[0]
    assert torch.equal(on_host.waveforms, on_device.waveforms)
    assert torch.equal(on_host.input_ids, on_device.input_ids)
