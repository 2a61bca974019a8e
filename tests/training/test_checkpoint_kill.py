"""Killed at any moment, a run leaves every checkpoint it reported as saved, or a newer one, whole."""

import contextlib
import random
import time
from pathlib import Path

import pytest

from clap_ds.weights import checkpoint_files
from clap_ds.weights.checkpoint_files import Manifest
from tests.processes import TIMEOUT_S, warm_context
from tests.ranks import RankPool
from tests.training import checkpoint_ranks as ranks

NUM_KILLS = 20


@pytest.mark.end_to_end
def test_a_kill_at_any_moment_leaves_the_last_good_one_loadable(
    one_rank: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    random_moments, context = random.Random(5), warm_context()
    half_written, one_save_s = 0, 0.0
    for kill in range(NUM_KILLS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=ranks.save_until_killed, args=(str(tmp_path), theirs))
        process.start()
        theirs.close()
        # Some saves, and a random part of another, however long they take here. The first kill is after some, to know how long.
        messages: list[tuple[float, int]] = []  # when, and the step reported, 0 when it is ready
        for _ in range(1 + (saves := 3 - kill % 4)):
            assert ours.poll(TIMEOUT_S)
            messages.append((time.monotonic(), ours.recv()))
        one_save_s = (messages[-1][0] - messages[0][0]) / saves if saves else one_save_s
        process.join(random_moments.uniform(0.0, one_save_s))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while ours.poll():
                messages.append((time.monotonic(), ours.recv()))
        reported = messages[-1][1]
        half_written += any(path.name.startswith(".") for path in tmp_path.iterdir())
        newest = checkpoint_files.newest_good(tmp_path)
        assert (Manifest.read(newest).step if newest else 0) >= reported
    assert "passed over" not in capfd.readouterr().err
    assert half_written > NUM_KILLS / 4
    ((step, losses),) = one_rank.run(ranks.load_newest, str(tmp_path))
    assert step >= max(reported, NUM_KILLS + 1)
    assert losses[0] < 10
