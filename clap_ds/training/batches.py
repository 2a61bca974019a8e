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
from clap_ds.training.schedule import pairs_together

MEASURED = 8
"""Global batches whose captions are compared, the first ones."""
LARGEST_SHARE = 0.01
"""Of captions that have an equal one in their batch, which isn't warned of."""


def too_few_items(session: Session) -> str | None:
    """What to say where a global batch has more pairs than the data has items, as far as that is known."""
    pairs = pairs_together(session.run, session.ranks.world_size)
    items = session.batches.statistics().get("num_samples")
    if items is None or items >= pairs:
        return None
    return f"a global batch has {pairs:,} pairs, the data {items:,} items: one that meets itself there counts as wrong"


def with_captions_compared(batches: Iterable[Batch], session: Session) -> Iterator[Batch]:
    """The same batches. With the first ones, a collective, it finds and reports the share of captions that have an equal one in
    their global batch; the device is waited for once."""
    run = session.run  # size: micro-batches of a global batch
    size = run.gradient_accumulation_steps if run.clap.train.accumulation == "cached" else 1
    hashes: list[Tensor] = []
    for number, batch in enumerate(batches, start=1):
        if number <= MEASURED * size:
            hashes.append(batch.caption_hashes())
            if number == MEASURED * size:
                compared = [_have_equals(torch.cat(hashes[first : first + size])) for first in range(0, number, size)]
                if session.ranks.is_first:
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
    session.record.update_summary(equal_captions_share=share)
    if share > LARGEST_SHARE and session.run.clap.loss.same_caption != "positive":
        print(
            f"warning: {100 * share:.1f} % of the captions have an equal one in their global batch and count as wrong for its"
            ' clip: give captions that differ, or set clap.loss.same_caption "positive", which matters to'
            ' clap.loss.kind "sigmoid"',
            flush=True,
        )
