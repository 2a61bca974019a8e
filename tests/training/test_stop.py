"""A signal to one rank stops all of them after the same step; repetitions are one request, a later signal is another."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from clap_ds.training import stop
from tests.rank_pool import RankPool
from tests.training.training_commands import wait_until


def _agreed(signalled: int, number: int) -> tuple[list[int], bool]:
    """What ranks agree on after each of three steps, and whether signals are afterwards handled as before."""
    before, answers = list(map(signal.getsignal, stop.STOP_SIGNALS)), []
    with stop.StopRequest(lambda number: None) as request:
        for step in range(3):
            if step == 1 and dist.get_rank() == signalled:
                os.kill(os.getpid(), number)
                wait_until(lambda: request._number)
            answers.append(request.agreed())
    return answers, before == list(map(signal.getsignal, stop.STOP_SIGNALS)) and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("signalled", "number"), [(0, signal.SIGTERM), (1, signal.SIGUSR1), (1, signal.SIGINT)])
def test_all_ranks_stop_after_the_same_step(two_ranks: RankPool, signalled: int, number: signal.Signals) -> None:
    assert two_ranks.run(_agreed, signalled, int(number)) == [([0, number, number], True)] * 2


def _ended_by(pause_s: float, repeat_s: float) -> list[int]:
    """Signals that ended the rank, of two that came so far apart, when they are one request for `repeat_s`."""
    ended: list[int] = []
    stop.REPEAT_S = repeat_s
    with stop.StopRequest(ended.append) as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: request._number)
        time.sleep(pause_s)
        os.kill(os.getpid(), signal.SIGTERM)
        if pause_s > stop.REPEAT_S:
            wait_until(lambda: ended)
    return ended


def test_only_a_later_signal_ends_at_once(two_ranks: RankPool) -> None:
    assert two_ranks.run(_ended_by, 0.0, 30.0) == [[]] * 2
    assert two_ranks.run(_ended_by, 0.7, 0.5) == [[signal.SIGTERM]] * 2
