"""Text that looks like a secret is hidden; other text is unchanged."""

import pytest

from clap_ds.config.redaction import redacted, redacted_all


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train.py --hf_token=abc123 --x 1", "train.py --hf_token=[hidden] --x 1"),
        ("train.py --api-key 'abc' y", "train.py --api-key '[hidden]' y"),
        ("https://b.s3/a.tar?X-Amz-Date=1&X-Amz-Signature=f0", "https://b.s3/a.tar?[hidden]"),
        ("https://b/a.tar?sv=1&sig=f0%3D can't be read", "https://b/a.tar?[hidden] can't be read"),
        ("env HF_TOKEN=abc CONTEXT_LENGTH=7 x", "env HF_TOKEN=[hidden] CONTEXT_LENGTH=7 x"),
        ("Authorization: Bearer ey.J0", "Authorization: Bearer [hidden]"),
        ("https://host/a.tar?part=3", "https://host/a.tar?part=3"),
        ("s3://me:pass@bucket/x", "s3://[hidden]@bucket/x"),
        ("s3://me:p@ss@bucket/x", "s3://[hidden]@bucket/x"),
        ("hf_" + "a" * 34, "[hidden]"),
        ("loss 0.3 at step 5, 12:30", "loss 0.3 at step 5, 12:30"),
    ],
)
def test_secrets_in_text(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted_all({"a": [{text: text}]}) == {"a": [{shown: shown}]}


def test_fields_by_their_names() -> None:
    settings = {"comet": {"api_key": "abc", "project": "clap"}, "context_length": 7, "tokenizer": "roberta-base"}
    assert redacted_all(settings) == settings | {"comet": {"api_key": "[hidden]", "project": "clap"}}


def test_words_of_a_command() -> None:
    words = ["python", "train.py", "--hf_token", "abc", "--secret", "--samples", "5"]
    assert redacted_all(words) == ["python", "train.py", "--hf_token", "[hidden]", "--secret", "--samples", "5"]
