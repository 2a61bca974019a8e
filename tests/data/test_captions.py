import json
from pathlib import Path

import pytest

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.captions import captions_of
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


@pytest.mark.parametrize(
    ("num_clips", "num_captions", "is_few"),
    [(3, 1, True), (3, 2, False), (1, 1, False), (100, 2, False), (150, 2, True), (150, 3, False)],
)
def test_captions_that_hardly_differ_are_warned_of_in_building_and_training(
    tmp_path: Path, open_source: OpenSource, capsys: pytest.CaptureFixture[str],
    num_clips: int, num_captions: int, is_few: bool,
) -> None:  # fmt: skip
    rows = write_list(tmp_path, num_clips).read_text().splitlines()
    rows[1:] = [f"{row.split(',')[0]},{n % num_captions}" for n, row in enumerate(rows[1:])]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    warning = f"only {num_captions} different caption(s) among {num_clips} clips"
    assert run(tmp_path / "list.csv", tmp_path / "out") == 0
    assert (warning in capsys.readouterr().err) == is_few
    with open_source(f"{tmp_path}/out/*.tar") as source:
        for _ in range(40):
            next(source)
    assert capsys.readouterr().err.count("different caption(s)") == is_few
