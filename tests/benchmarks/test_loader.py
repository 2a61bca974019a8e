"""The loader's benchmark on shards of its own making, small: what it starts and what it asks of it."""

from pathlib import Path

import pytest

from benchmarks import loader
from tests.data.tars import marked_tars


@pytest.mark.end_to_end
def test_a_child_loads_and_says_what_it_did(tmp_path: Path, tokenizer_dir: str) -> None:
    marked_tars(tmp_path, 2, 40)
    config = loader.write_config(tmp_path, tmp_path, Path(tokenizer_dir), 8)
    content = (
        config.read_text().replace("htsat_tiny_roberta_base", "micro").replace('"text_tokens": 77', '"text_tokens": 12')
    )
    config.write_text(content)
    with loader.children(child=(loader.PACKAGE.parent, config, 2)) as started:
        loaded = started["child"](0.2)
    assert loaded["done"] % 8 == 0
    assert loaded["done"] > 0
    assert loaded["per_s"] <= loaded["done"] / 0.2
    assert loaded["memory_mb"] > 50
    assert loaded["mb_per_s"] > 0
