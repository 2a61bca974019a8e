"""The hub is asked only after the cache, once it has given an answer, and never waited for."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from huggingface_hub import constants

from clap_ds.model import hub
from clap_ds.model.hub import load_by_name


@contextmanager
def silent_hub() -> Iterator[str]:
    """The URL of one that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=32) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def hub_that_answers(status: int) -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Where things were looked for: in the cache (True), on the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_S", 60.0)
    return []


def look_up(asked: list[bool], on_hub: bool = False) -> str:
    """What is found, or why nothing is."""

    def load(local_files_only: bool) -> str:
        asked.append(local_files_only)
        if local_files_only or not on_hub:
            raise OSError("no such repository\nand more")
        return "found"

    try:
        return load_by_name("some/name", load, field="field", what="tokenizer")
    except ValueError as error:
        return str(error)


def test_a_hub_that_never_answers(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.3)
    with silent_hub() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        said = look_up(asked, on_hub=True)
    assert asked == [True]
    assert said.startswith("field: no tokenizer 'some/name'; tried: no such folder in ")
    assert f"{constants.HF_HUB_CACHE}; the hub: {url} can't be reached (no answer within 0.3 s)" in said
    assert all(part in said for part in ("a local folder", "HF_HOME", "HF_HUB_OFFLINE=1"))
    assert f"the hub: {url} can't be reached (" in look_up(asked, on_hub=True)  # nobody listens there any more
    assert asked == [True, True]


@pytest.mark.parametrize(
    ("status", "on_hub", "end"),
    [(503, True, "HF_HUB_OFFLINE=1"), (404, False, "the hub: no such repository"), (200, True, "found")],
)
def test_a_hub_that_answers(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, status: int, on_hub: bool, end: str
) -> None:
    with hub_that_answers(status) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert look_up(asked, on_hub).endswith(end)
    assert asked == [True, False][: 1 + (status < 500)]
