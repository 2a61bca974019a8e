import json

import pytest

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.captions import captions_of


@pytest.mark.parametrize(
    ("members", "captions"),
    [
        ({"txt": b"  a bell\n"}, {"a bell"}),
        ({"txt": "\ufeffein Glöckchen".encode()}, {"ein Glöckchen"}),
        ({"json": json.dumps({"caption": "a bell"}).encode()}, {"a bell"}),
        ({"json": json.dumps({"text": ["a bell", "", "a gong"]}).encode()}, {"a bell", "a gong"}),
        ({"txt": b"a bell", "json": json.dumps({"kind": "bell"}).encode()}, {"a bell"}),
    ],
)
def test_captions_are_found(members: dict[str, bytes], captions: set[str]) -> None:
    assert set(captions_of(members)) == captions


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "no caption"),
        ({"json": b'{"kind": "bell"}'}, "no caption"),
        ({"json": b'["a bell"]'}, "no caption"),
        ({"json": b'{"caption": '}, "json isn't valid"),
        ({"json": b'{"caption": ["a", null]}'}, "neither a string nor a list"),
        ({"json": b'{"caption": []}'}, "empty caption"),
        ({"txt": b" \n"}, "empty caption"),
        ({"txt": b"\xff\xfe\x00"}, "UTF-8"),
        ({"txt": b"a" * 70_000}, "70,000 characters; expected at most 65,536"),
        ({"txt": memoryview(b"a" * 10_000_000)}, "txt has 10,000,000 bytes; expected at most 1,048,576"),
        ({"json": b'{"caption": "a", "n": ' + b"9" * 5000 + b"}"}, "json isn't valid"),
        ({"json": b'{"caption": "a\\ud800"}'}, "json isn't valid"),
        ({"json": b"[" * 100_000}, "json isn't valid: nested too deeply"),
    ],
)
def test_missing_captions_are_refused_with_a_reason(members: dict[str, bytes], reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        captions_of(members)
