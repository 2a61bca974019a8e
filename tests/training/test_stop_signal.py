"""A signal to one rank stops all after the same step; later signals change nothing."""

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from clap_ds.distributed import watchdog
from clap_ds.training import stop_signal
from tests.rank_pool import RankPool

LIMIT = timedelta(seconds=60)


def _agreed(signalled: int, number: int) -> tuple[list[tuple[int, bool]], bool]:
    """Return the agreed signal after each of four steps, and whether signal handlers are restored.
    Signals arrive after ranks have asked. In each step, another rank asks after the previous one
    has continued, which must not wait for it."""
    before = list(map(signal.getsignal, watchdog.SIGNALS))
    answers = []
    with stop_signal.StopRequest() as request:
        store = request._store
        key = request._key
        for step in range(4):
            if dist.get_rank() != step % 2:
                store.wait([f"{key} {step}"], LIMIT)
            request.ask(is_late=step == 2 and dist.get_rank() == 0)
            store.set(f"{key} {step}", "")
            store.set(f"{key} {step} {dist.get_rank()}", "")
            if dist.get_rank() == signalled and step in (1, 2):
                store.wait([f"{key} {step} {rank}" for rank in range(2)], LIMIT)
                os.kill(os.getpid(), number if step == 1 else signal.SIGINT)
            if step == 1:
                store.wait([key], LIMIT)
            answers.append(request.wait())
    return answers, before == list(map(signal.getsignal, watchdog.SIGNALS))


@pytest.mark.parametrize(
    ("signalled", "number"),
    [(at % 2, number) for at, number in enumerate(watchdog.SIGNALS)],
)
def test_all_ranks_stop_after_the_same_step(
    two_ranks: RankPool, signalled: int, number: signal.Signals
) -> None:
    assert (
        two_ranks.run(_agreed, signalled, int(number))
        == [([(0, False), (0, False), (number, True), (number, False)], True)] * 2
    )
