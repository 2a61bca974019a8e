"""The hub is asked only after the cache, once it has given an answer, and never waited for."""

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from clap_ds.model import hub
from clap_ds.model.hub import load_by_name


@contextlib.contextmanager
def hub_that(answers: int | None) -> Iterator[str]:
    """The URL of one that gives a status or, of None, takes connections and says nothing."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(answers or 0)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    if answers is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        return
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ADVICE = "Without a network, name a local folder (a tokenizer's is made by clap-shards build --train_tokenizer); or set HF_HOME"


@pytest.mark.parametrize(
    ("status", "on_hub", "asked", "says"),
    [
        (None, True, [True], f"can't be reached (no answer within 0.3 s). {ADVICE}"),
        (503, True, [True], f"answers with an error, 503. {ADVICE}"),
        (404, False, [True, False], "the hub: no such repository"),
        (200, True, [True, False], "found"),
    ],
)
def test_places_are_asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, status: int | None, on_hub: bool, asked: list[bool], says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_S", 60.0 if status else 0.3)
    places = []

    def load(local_files_only: bool) -> str:
        places.append(local_files_only)
        if local_files_only or not on_hub:
            raise OSError("no such repository\nand more")
        return "found"

    with hub_that(status) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        try:
            found = load_by_name("some/name", load, field="field", what="tokenizer")
        except ValueError as error:
            found = str(error)
            assert found.startswith("field: no tokenizer 'some/name'; tried: no such folder in ")
            assert f"not in the hub's local cache, {constants.HF_HUB_CACHE}; the hub: " in found
    assert says in found
    assert "and more" not in found
    assert places == asked
