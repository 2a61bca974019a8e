"""The control experiment of `clap.train.shuffle_captions`: captions that say nothing of their clips."""

import random
from collections.abc import Iterator

from clap_ds.data.batch import Batch
from clap_ds.engine.session import Session


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
