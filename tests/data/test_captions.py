import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.data.clip import captions_of
from clap_ds.data.decoding import BrokenItemError
from tests.data.builds import run, write_list
from tests.data.conftest import OpenSource


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


@pytest.mark.parametrize(("clips", "different", "is_few"), [(3, 1, 1), (1, 1, 0), (99, 2, 0), (150, 2, 1), (150, 3, 0)])
def test_building_and_training_warn_of_captions_that_hardly_differ(
    tmp_path: Path, open_source: OpenSource, capsys: Any, clips: int, different: int, is_few: int
) -> None:
    heading, *rows = write_list(tmp_path, clips).read_text().splitlines()
    rows = [f"{row.partition(',')[0]},{number % different}" for number, row in enumerate(rows)]
    (tmp_path / "list.csv").write_text("\n".join([heading, *rows]))
    run(tmp_path / "list.csv", tmp_path / "out")
    with open_source(f"{tmp_path}/out/*.tar", micro_batch=150) as source:
        next(source)
    assert capsys.readouterr().err.count(f"only {different} different caption(s) among {clips} clips") == 2 * is_few
