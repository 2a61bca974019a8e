"""A signal to one rank stops all after the same step; later signals change nothing."""

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from clap_ds.distributed import watchdog
from clap_ds.training import stop_signal

LIMIT = timedelta(seconds=60)


def agree_in_four_steps(signaled_rank: int, number: int) -> tuple[list[tuple[int, bool]], bool]:
    """Return the agreed signal after each of four steps, and whether signal handlers are restored.

    The signal arrives in step 1, after ranks have asked, and another one in step 2. In each step,
    one rank asks after the other one has continued, which must not wait for it.
    """
    rank = dist.get_rank()
    handlers = list(map(signal.getsignal, watchdog.SIGNALS))
    agreed = []
    with stop_signal.StopRequest() as request:
        store = request._store
        key = request._key
        for step in range(4):
            if rank != step % 2:
                store.wait([f"{key} {step}"], LIMIT)
            request.ask(is_late=step == 2 and rank == 0)
            store.set(f"{key} {step}", "")
            store.set(f"{key} {step} {rank}", "")
            if rank == signaled_rank and step in (1, 2):
                store.wait([f"{key} {step} 0", f"{key} {step} 1"], LIMIT)
                os.kill(os.getpid(), number if step == 1 else signal.SIGINT)
            if step == 1:
                store.wait([key], LIMIT)
            agreed.append(request.wait())
    return agreed, handlers == list(map(signal.getsignal, watchdog.SIGNALS))


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_signal_to_one_rank_stops_all_after_same_step(two_ranks, rank, number):
    expected = [(0, False), (0, False), (number, True), (number, False)]
    results = two_ranks.run(agree_in_four_steps, rank, int(number))
    assert results == [(expected, True)] * 2
