"""Has what a run takes from the hub on every host before any work is done.

Rank 0 looks first, so that where it can't be had one rank finds out and all stop; then one rank of every other host. All others
find it in the cache of their host when they load it.
"""

from __future__ import annotations

from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.ranks.agreement import on_first
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.watch import doing


@doing("asking the hub")
def fetch(run: RunSettings, ranks: Ranks) -> None:
    """A collective; ValueError where a tokenizer or the text tower's weights can't be had, or don't fit the model."""
    on_first(lambda: _load(run))
    if ranks.local_rank == 0 and not ranks.is_first:
        _load(run)


def _load(run: RunSettings) -> None:
    text = run.clap.preset().text
    if isinstance(run.clap.data, ShardData):
        from clap_ds.model.tokenizer import load_tokenizer

        load_tokenizer(run.clap.data.tokenizer, vocab_size=text.vocab_size)
    if run.clap.model.text_from_hub:
        from clap_ds.model.text import pretrained

        pretrained(text)
