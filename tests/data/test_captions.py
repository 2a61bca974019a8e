import json

import pytest

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.captions import captions_of


@pytest.mark.parametrize(
    ("members", "captions"),
    [
        ({"txt": b"  a bell\n"}, ["a bell"]),
        ({"txt": "\ufeffein Glöckchen".encode()}, ["ein Glöckchen"]),
        ({"json": json.dumps({"caption": "a bell", "text": "no"}).encode()}, ["a bell"]),
        ({"json": json.dumps({"text": ["a bell", "", "a gong"]}).encode()}, ["a bell", "a gong"]),
        ({}, "no caption: expected txt"),
        ({"json": b'["a bell"]'}, "no caption"),
        ({"json": b'{"caption": '}, "can't be read: Expecting value"),
        ({"txt": b" \n"}, "empty caption"),
    ],
)
def test_captions_are_found_or_refused_with_a_reason(members: dict[str, bytes], captions: list[str] | str) -> None:
    if isinstance(captions, list):
        assert captions_of(members) == captions
    else:
        with pytest.raises(BrokenItemError, match=captions):
            captions_of(members)
