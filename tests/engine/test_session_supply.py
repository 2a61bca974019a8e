from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.data.supply import Supply
from clap_ds.engine.session import Session


def test_the_loader_is_compared_with_steps_that_have_warmed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A first step, which may have compiled for a minute, isn't one even where it is logged alone."""
    parts: dict[str, Any] = dict.fromkeys(("run", "device", "record", "engine"))
    ranks: Any = SimpleNamespace(is_first=True, local_world_size=1)
    batches: Any = SimpleNamespace(supply=lambda: Supply(100.0, 1, "mel"))
    session = Session(**parts, ranks=ranks, batches=batches)
    session.tell_supply([0.1])
    assert not capsys.readouterr().out
    session.tell_supply([200.0])
    session.tell_supply([300.0])
    assert capsys.readouterr().out.count("the step of their rank takes 200: it will wait") == 1
