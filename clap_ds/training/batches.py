"""What global batches hold that a contrastive loss takes for wrong though it isn't: the same item again, and equal captions.

Rank 0 warns of each once. Which batches a step is made of is the schedule's.
"""

import random
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.data.batch import Batch
from clap_ds.engine.loss import gather_captions
from clap_ds.engine.session import Session
from clap_ds.training.schedule import Schedule, global_batches

MEASURED = 8
"""Global batches whose captions are compared, the first ones."""
LARGEST_SHARE = 0.01
"""Of captions that have an equal one in their batch, which isn't warned of."""


def too_few_items(session: Session) -> str | None:
    """What to say where a global batch has more pairs than the data has items, as far as that is known."""
    largest = max(global_batches(session.run, session.ranks.world_size))
    items = session.batches.statistics().get("num_samples")
    if items is None or items >= largest:
        return None
    return (
        f"a global batch has {largest:,} pairs, the data {items:,} items: an item meets itself there and counts as wrong for"
        " itself; a smaller batch or more data spares it that"
    )


def with_captions_compared(
    batches: Iterable[Batch], session: Session, schedule: Schedule, samples: int
) -> Iterator[Batch]:
    """The same batches, those trained after so many samples. With the first ones, a collective, it finds and reports the share
    of captions that have an equal one in their global batch; the device is waited for once."""
    steps, loss = schedule.next_steps(samples, MEASURED), session.run.clap.train.accumulation
    sizes = steps if loss == "cached" else [1] * min(MEASURED, sum(steps))  # micro-batches of each global batch
    hashes: list[Tensor] = []
    compared: list[Tensor] = []
    for batch in batches:
        if sizes:
            hashes.append(batch.caption_hashes())
            if len(hashes) == sizes[0]:
                compared.append(_have_equals(torch.cat(hashes)))
                hashes, sizes = [], sizes[1:]
                if not sizes and session.ranks.is_first:
                    _report(session, float(torch.cat(compared).double().mean()))
        yield batch


def shuffled_captions(session: Session) -> Iterator[Batch]:
    """The session's batches with captions moved on by a random number of clips: none keeps its own, and where batches are drawn
    at random, a caption says nothing of its clip."""
    generator = random.Random(f"seed {session.run.clap.seed}, rank {session.ranks.rank}")
    for batch in session.batches:
        distance = generator.randrange(1, max(2, len(batch)))
        input_ids, attention_mask = (ids.roll(distance, 0) for ids in (batch.input_ids, batch.attention_mask))
        shuffled = Batch(batch.audio, input_ids, attention_mask, num_tokens=batch.num_tokens)
        if batch.packed is not None:
            shuffled.pack()
        yield shuffled


def _have_equals(captions_B: Tensor) -> Tensor:
    """For each caption of the global batch, in any order, whether another one there is equal: (N,) bool. A collective."""
    captions_N = gather_captions(captions_B)
    assert captions_N is not None
    in_order_N = captions_N.sort().values
    like_last = F.pad(in_order_N[1:] == in_order_N[:-1], (1, 1))
    return like_last[1:] | like_last[:-1]


def _report(session: Session, share: float) -> None:
    settings = session.run.clap.loss
    session.record.update_summary(equal_captions_share=share)
    if share <= LARGEST_SHARE or settings.same_caption == "positive":
        return
    remedy = 'set clap.loss.same_caption "positive"'
    if settings.kind == "softmax":
        remedy += ' and clap.loss.kind "sigmoid" (softmax learns the same either way, at a loss that stays above 0)'
    print(
        f"warning: {100 * share:.1f} % of the captions have an equal one in their global batch and count as wrong for its clip"
        " (or for their own, where a batch has a clip twice, as at the end of an epoch): give captions that differ, or"
        f" {remedy}",
        flush=True,
    )
