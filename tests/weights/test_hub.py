"""Check that the hub is queried only after the cache, if it responds, and without waiting long."""

import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from clap_ds.weights import hub
from clap_ds.weights.hub import load_by_name


@pytest.mark.parametrize(
    ("status", "on_hub", "asked", "says"),
    [
        (None, True, [True], "can't be reached (no answer within 0.3 s). Without a network, name a local folder"),
        (404, False, [True, False], "the hub: no such repository"),
        (200, True, [True, False], "found"),
    ],
)
def test_places_are_asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, status: int | None, on_hub: bool, asked: list[bool], says: str
) -> None:
    def head(*_: object, **__: object) -> SimpleNamespace:
        time.sleep(0 if status else 60)
        return SimpleNamespace(status_code=status)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_S", 60.0 if status else 0.3)
    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=head))
    places = []

    def load(local_files_only: bool) -> str:
        places.append(local_files_only)
        if local_files_only or not on_hub:
            raise OSError("no such repository\nand more")
        return "found"

    try:
        found = load_by_name("some/name", load, field="field", what="tokenizer")
    except ValueError as error:
        found = str(error)
        assert found.startswith("field: no tokenizer 'some/name'; tried: no such folder in ")
        assert f"not in the hub's local cache, {constants.HF_HUB_CACHE}; the hub: " in found
    assert says in found
    assert "and more" not in found
    assert places == asked
