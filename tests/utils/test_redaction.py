"""Text that looks like a secret is hidden; other text is unchanged."""

import json

import pytest

from clap_ds.config.settings import make_run_model
from clap_ds.run_records.schema import StepLine, Summary
from clap_ds.utils.errors import list_fields
from clap_ds.utils.redaction import redact, redact_all


@pytest.mark.parametrize(
    ("text", "redacted_text"),
    [
        ("train.py --hf_token=abc123 --x 1", "train.py --hf_token=[hidden] --x 1"),
        ("train.py --api-key 'abc' y", "train.py --api-key '[hidden]' y"),
        ("https://b/a.tar?sv=1&sig=f0%3D can't be read", "https://b/a.tar?[hidden] can't be read"),
        ("env HF_TOKEN=abc CONTEXT_LENGTH=7 x", "env HF_TOKEN=[hidden] CONTEXT_LENGTH=7 x"),
        ("Authorization: Bearer ey.J0", "Authorization: Bearer [hidden]"),
        ("s3://me:p@ss@bucket/x", "s3://[hidden]@bucket/x"),
        ("hf_" + "a" * 34, "[hidden]"),
        ("loss 0.3 at step 5, 12:30", "loss 0.3 at step 5, 12:30"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("AccountName=a;AccountKey=abc==", "AccountName=a;AccountKey=[hidden]"),
        (
            "--wandb_key abc --set comet.api_key=x",
            "--wandb_key [hidden] --set comet.api_key=[hidden]",
        ),
        ('password: x, "password": "x y"', 'password: [hidden], "password": "[hidden]"'),
        *(
            (f"{start}{'a1' * 16}", "[hidden]")
            for start in ("github_pat_", "glpat-", "sk-proj-", "xoxb-", "ghp_")
        ),
        ("tokenizer: a, max_tokens=3, pad_token=x", "tokenizer: a, max_tokens=3, pad_token=x"),
        ("token_type_embeddings.weight: [1]", "token_type_embeddings.weight: [1]"),
    ],
)
def test_text_with_secrets_hides_them(text, redacted_text):
    assert redact(text) == redacted_text
    assert redact_all({"a": [{text: text}]}) == {"a": [{redacted_text: redacted_text}]}


@pytest.mark.parametrize(
    "content",
    [
        {"wandb": {"key": "x y"}},
        {"account_key": "x y"},
        {"credentials": {"user": "x y"}},
        {"secrets": ["x y"]},
    ],
)
def test_field_with_the_name_of_a_secret_is_hidden_whole(content):
    text = json.dumps(redact_all(content))
    assert "[hidden]" in text
    assert "x y" not in text


def test_names_of_this_project_are_no_secrets():
    """Fields of runs, DeepSpeed and records, and options of tokenizers are shown."""
    names = [*Summary.__annotations__, *StepLine.__annotations__]
    names += ["additional_special_tokens", "cls_token"]
    for name in list_fields(make_run_model("AdamW", "WarmupLR")):
        if not name.endswith("api_key"):
            names.append(name)
    assert len(names) > 300
    content = dict.fromkeys(names, "shown")
    assert redact_all(content) == content
    text = "\n".join(f"--{name} shown {name}=shown {name}: shown" for name in names)
    assert redact(text) == text


def test_command_with_secret_after_its_option_hides_it():
    command = ["python", "train.py", "--hf_token", "abc", "--secret", "--samples", "5"]
    redacted_command = [*command]
    redacted_command[3] = "[hidden]"
    assert redact_all(command) == redacted_command
