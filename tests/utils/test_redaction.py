"""Text that looks like a secret is hidden; other text is unchanged."""

import json

import pytest

from clap_ds.config.settings import make_run_model
from clap_ds.run_records.schema import StepLine, Summary
from clap_ds.utils.errors import _fields
from clap_ds.utils.redaction import redacted, redacted_all


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
        ("https://abc@host/x", "https://[hidden]@host/x"),
        (
            "git+ssh://git@host/x abfs://container@account/x",
            "git+ssh://git@host/x abfs://container@account/x",
        ),
        ("AccountName=a;AccountKey=abc==", "AccountName=a;AccountKey=[hidden]"),
        (
            "--wandb_key abc --set comet.api_key=x",
            "--wandb_key [hidden] --set comet.api_key=[hidden]",
        ),
        ('password: x, "password": "x y"', 'password: [hidden], "password": "[hidden]"'),
        ("aws_secret_access_key=x", "aws_secret_access_key=[hidden]"),
        ("https://a.net/b?sv=1&sp=r&sas=x", "https://a.net/b?[hidden]"),
        *(
            (f"{start}{'a1' * 16}", "[hidden]")
            for start in ("github_pat_", "glpat-", "sk-proj-", "xoxb-", "ghp_")
        ),
        ("tokenizer: a, max_tokens=3, pad_token=x", "tokenizer: a, max_tokens=3, pad_token=x"),
        ("token_type_embeddings.weight: [1]", "token_type_embeddings.weight: [1]"),
    ],
)
def test_secrets_in_text(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted_all({"a": [{text: text}]}) == {"a": [{shown: shown}]}


def test_fields_of_secrets_are_hidden_whole() -> None:
    shown = {
        "comet": {"project": "clap"},
        "context_length": 7,
        "tokenizer": "roberta-base",
        "max_tokens": "5",
    }
    assert redacted_all(shown) == shown
    for secret in ({"wandb": {"key": "a b"}}, {"account_key": "a"}, {"sas": "a"}, {"wandb.key": "a"},
                   {"credentials": {"user": "a"}}, {"secrets": ["a b"]}, {"comet": {"api_key": "a"}}):  # fmt: skip
        assert ': "[hidden]"}' in json.dumps(redacted_all(secret)).replace(
            '["[hidden]"]', '"[hidden]"'
        )


def test_no_name_of_this_project_is_a_secret() -> None:
    """Fields of runs, DeepSpeed and records, and options of tokenizers are shown."""
    names = [
        name
        for name in _fields(make_run_model("AdamW", "WarmupLR"))
        if not name.endswith("api_key")
    ]
    names += [
        *Summary.__annotations__,
        *StepLine.__annotations__,
        "additional_special_tokens",
        "cls_token",
    ]
    assert len(names) > 300
    assert redacted_all(dict.fromkeys(names, "shown")) == dict.fromkeys(names, "shown")
    text = "\n".join(f"--{name} shown {name}=shown {name}: shown" for name in names)
    assert redacted(text) == text


def test_words_of_a_command() -> None:
    words = ["python", "train.py", "--hf_token", "abc", "--secret", "--samples", "5"]
    assert redacted_all(words) == [
        "python",
        "train.py",
        "--hf_token",
        "[hidden]",
        "--secret",
        "--samples",
        "5",
    ]
