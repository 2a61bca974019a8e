"""User errors: one message and exit code 2. Standard library only."""

from __future__ import annotations

import difflib
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, get_args

from clap_ds.utils.redaction import redact_urls

# exit codes: of a run that is rejected for a user error, and after Ctrl-C
USER_ERROR = 2
INTERRUPTED = 130
# patterns of names in other trainers → fields here
OTHER_NAMES = {
    "accum_freq|accumulation(_steps)?|accumulate_grad_batches": "gradient_accumulation_steps",
    "(micro_?)?batch(_?size)?|per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "(base_|max_|peak_)?(lr|learning_rate)": "optimizer.params.lr",
    "(mixed_)?precision|amp|(fp|float)32": "bf16.enabled",
    "warm_?up(_steps|_iters|_epochs|_ratio)?": "scheduler.params.warmup_num_steps",
    "wd": "optimizer.params.weight_decay",
}
# items of a list that a message names
MOST_SHOWN = 5
# parts that pydantic adds to a field's name: kinds of `data`, JSON types of DeepSpeed's fields
UNION_TAGS = ("synthetic", "webdataset", "array", "integer", "number", "string")
# the schema's patterns of texts → their meaning
PATTERNS = {
    r"\S": "text that isn't blank",
    r"\{\}": "text with {}",
    "^[/~$]": "a path that begins with /, ~ or $",
}
# package → the extra that installs it
EXTRAS = {
    **dict.fromkeys(("soundfile", "webdataset", "braceexpand", "fsspec", "pynvml", "aiohttp"), "train"),
    "s3fs": "s3", "gcsfs": "gcs",
    **dict.fromkeys(("matplotlib", "markdown_it", "pandas"), "analysis"), "pyarrow": "embed",
    "open_clip": "open-clip",
}  # fmt: skip
# characters of a name from a file that a message quotes
LONGEST_NAME = 200
# characters of a line of a message, which may list many names
LONGEST_LINE = 2000
# a word or part of a path, or what stands in quotes
_LONG_NAME = re.compile(
    rf"(?<![^\s/])[^\s/]{{{LONGEST_NAME + 1},}}"
    rf"|(?<!\w)'[^'\n]{{{LONGEST_NAME + 1},}}'"
    rf'|(?<!\w)"[^"\n]{{{LONGEST_NAME + 1},}}"'
)
_LONG_LINE = re.compile(rf"[^\n]{{{LONGEST_LINE + 1},}}")


class UserError(ValueError):
    """An error to print as one message, without a traceback. Long names in it are cut."""

    def __init__(self, message: object = "") -> None:
        super().__init__(cut_names(str(message)))


class CollectiveUserError(UserError):
    """A UserError raised on every rank, so that only rank 0 prints it."""


def exit_code_of(action: Callable[[], object]) -> int:
    """Run a command and return its exit code.

    It is the command's own or 0, 2 with a message for a ValueError or OSError, or 130 after Ctrl-C.
    """
    try:
        code = action()
    except KeyboardInterrupt as stop:
        print("; ".join(["error: interrupted", *stop.args]), file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in EXTRAS:
            raise
        message = printable(str(error) + how_to_install(error), "\n")
        print("error:", textwrap.indent(message, "       ").lstrip(), file=sys.stderr)
        return USER_ERROR
    return code if isinstance(code, int) else 0


def how_to_install(error: Exception) -> str:
    """Return a hint if the error is a missing package that pip installs; empty otherwise."""
    # fsspec raises an ImportError of its own from it.
    missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    package = getattr(missing, "name", None) or ""
    if extra := EXTRAS.get(package):
        return f": pip install 'clap-ds[{extra}]'"
    return f": pip install {package}" if missing is error.__cause__ else ""


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


# The same problem may come back with every line or upload.
warn_once = functools.cache(warn)


def printable(text: str, exempt: str = "") -> str:
    """Return a message with credentials in URLs hidden, long names cut, and unprintable characters
    escaped except `exempt`."""
    # Escapes make names longer.
    return cut_names(escape(cut_names(redact_urls(text)), exempt))


def escape(text: str, exempt: str = "") -> str:
    """Escape unprintable characters except `exempt`: foreign text could control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in exempt
        else letter.encode("unicode_escape", "replace").decode()
        for letter in text
    )


def cut_names(message: str) -> str:
    """Cut the middle of names, quotes and lines that are longer than people read."""
    message = _LONG_NAME.sub(lambda name: _cut(name[0], LONGEST_NAME), message)
    return _LONG_LINE.sub(lambda line: _cut(line[0], LONGEST_LINE), message)


def _cut(text: str, most: int) -> str:
    end = most // 4
    return f"{text[: most - end - 1]}…{text[-end:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def some(items: Sequence[object]) -> str:
    """List the first few items, and the number of others."""
    text = ", ".join(map(str, items[:MOST_SHOWN]))
    num_more = len(items) - MOST_SHOWN
    return f"{text} and {num_more} more" if num_more > 0 else text


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun, such as `1 rank` and `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration_of(seconds: float) -> str:
    """Return a duration in a unit that suits it, such as `12 s` and `2.5 days`."""
    for unit, size_s in {"days": 86400, "hours": 3600, "minutes": 60}.items():
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def run_alone(main: Callable[[], object]) -> NoReturn:
    """Run the main function of a single-process command and exit with its code."""
    sys.exit(exit_code_of(main))


def did_you_mean(name: str, candidates: Collection[str], most_listed: int = 12) -> str:
    """Return a hint about an unknown name: the nearest candidate, or all if they are few."""
    near = find_near(name, candidates)
    if near is not None:
        return f"; did you mean {near!r}?"
    if 0 < len(candidates) <= most_listed:
        return f"; expected one of {', '.join(candidates)}"
    return ""


def find_near(name: str, candidates: Collection[str]) -> str | None:
    """Return the candidate that is nearest to a misspelled name in any case, or None."""
    by_case = {candidate.casefold(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.casefold(), by_case, n=1)
    return by_case[close[0]] if close else None


def sections_of(annotation: Any) -> list[Any]:
    """Return the pydantic models in a field's type: none, one (also if nullable), or several
    alternatives."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    sections = []
    for argument in get_args(annotation):
        sections += sections_of(argument)
    return sections


def list_fields(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_of(field.annotation):
            yield from list_fields(inner, f"{prefix}{name}.")


def _suggest_field(field: str, root: Any) -> str:
    """Return a hint about an unknown field.

    It names the first of these that exists:

    1. the field here for a setting of other trainers
    2. the nearest field in its section
    3. the only field of that name elsewhere
    4. its section's fields, if they are few
    """
    section, _, name = field.rpartition(".")
    for pattern, name_here in OTHER_NAMES.items():
        if re.fullmatch(pattern, name):
            return f"; did you mean {name_here!r}?"
    siblings: dict[str, str] = {}
    namesakes: list[str] = []
    for valid_field in list_fields(root):
        valid_section, _, valid_name = valid_field.rpartition(".")
        if valid_section == section:
            siblings[valid_name] = valid_field
        if valid_name == name:
            namesakes.append(valid_field)
    if name in siblings:
        # The section has another `source`.
        return f"; only another kind of {section} has it"
    near = find_near(name, siblings)
    if near is not None:
        return f"; did you mean {siblings[near]!r}?"
    if len(namesakes) == 1:
        return f"; did you mean {namesakes[0]!r}?"
    return did_you_mean(name, siblings)


def explain(details: Any, root: Any) -> str:
    """Format one of `ValidationError.errors()` of a pydantic model in a line: field, expected,
    found, nearest valid name."""
    field = ".".join(str(part) for part in details["loc"] if part not in UNION_TAGS)
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{field}: no such field{_suggest_field(field, root)}"
    value = details["input"]
    context = details.get("ctx", {})
    if kind == "union_tag_invalid":
        field += "." + context["discriminator"].strip("'")
        value = context["tag"]
    message = f"{field}: {_describe_expected(kind, details['msg'], context)}"
    if kind not in ("missing", "value_error", "union_tag_not_found"):
        message += f", found {json.dumps(value, default=str)}"
    if value == "auto":
        return message + '; nothing replaces "auto" here, as Hugging Face\'s Trainer does'
    if kind not in ("literal_error", "union_tag_invalid"):
        return message
    # The message quotes all valid values.
    valid_values = re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
    return message + did_you_mean(str(value), valid_values, most_listed=0)


def _describe_expected(kind: str, message: str, context: dict[str, Any]) -> str:
    """Return the expectation in this project's words, or else pydantic's message."""
    match kind:
        case "string_pattern_mismatch":
            pattern = context["pattern"]
            return f"expected {PATTERNS.get(pattern, pattern)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "expected an object"
        case "too_short":
            return f"expected at least {context['min_length']} items"
        case "too_long":
            return f"expected at most {context['max_length']} items"
        case "union_tag_invalid":
            return f"expected {context['expected_tags'].replace(', ', ' or ')}"
    message = message.removeprefix("Value error, ").replace("Input should be", "expected")
    return message[0].lower() + message[1:]
