"""What a run has otherwise than the checkpoint it resumes from: what must be accepted, what is merely said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.files import flatten
from clap_ds.config.model import ClapConfig
from clap_ds.config.settings import RunSettings
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.weights.checkpoint_files import Manifest
from clap_ds.weights.formats import have_same_shapes
from clap_ds.weights.load import check_same_model, differences, tokenizer_of

_SAID_ELSEWHERE = (
    *("bf16", "fp16", "torch_autocast", "optimizer.type"),
    *("clap.model.preset", "clap.data.tokenizer", "clap.train.freeze", "clap.loss.kind"),
)
_OF_NO_CONSEQUENCE = (
    *("clap.output", "clap.checkpoint", "clap.bench", "clap.hardware", "clap.debug"),
    *("clap.train.resume", "clap.train.log_every_steps"),
)
_PROBES = ["A dog barks; rain falls on a tin roof.", "ÜBER 3 Vögel singen…"]


@dataclass
class Changes:
    """In words, with both values.

    Attributes:
        to_accept: what makes it another training: the tokenizer, the front end or other sizes of the model, the precision, the
            optimizer, the towers that are trained.
        others: every other setting that differs.
        weights_only: the optimizer's state doesn't fit; weights and progress do.
        scheduler: the learning rate's course is another one's.
        other_model: one that the weights don't go into.
    """

    to_accept: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    weights_only: bool = False
    scheduler: bool = False
    other_model: bool = False


def compare(
    folder: Path, manifest: Manifest, model: ClapConfig, engine: dict[str, Any], run: RunSettings | None
) -> Changes:
    """Between a checkpoint and the run that resumes from it.

    Args:
        model: of this run.
        engine: this run's, as `clap_ds.engine.state.describe` has it.
        run: its settings, None to look at model and engine alone.
    """
    changes = Changes()
    theirs = ClapConfig.model_validate(manifest.model)
    try:
        check_same_model(folder, theirs, model)
    except ValueError as error:
        changes.to_accept.append(str(error))
        changes.weights_only = True
        changes.other_model = not have_same_shapes(theirs, model)
    for name in sorted(manifest.engine.keys() & engine.keys(), key="num_trained_parameters".__eq__):
        if name == "num_trained_parameters" and changes.to_accept:
            continue  # of what is named already
        if found := differences({name: manifest.engine[name]}, {name: engine[name]}):
            (changes.others if name == "scheduler" else changes.to_accept).extend(found)
            changes.scheduler |= name == "scheduler"
            changes.weights_only |= name != "scheduler"
    if run is None:
        return changes
    tokenizer = getattr(run.clap.data, "tokenizer", None)
    if problem := tokenizer_problem(tokenizer_of(folder), tokenizer, vocab_size=model.text.vocab_size):
        changes.to_accept.append(f"the tokenizer: {problem}")
    if manifest.settings:
        deepspeed = {name: value for name, value in manifest.settings.items() if name != "clap"}
        if (there := RunSettings(run.path, run.clap, deepspeed).precision) != run.precision:
            changes.to_accept.append(f"the precision is {there} there, {run.precision} here")
        changes.others += _different_settings(manifest.settings, run.resolved())
    return changes


def tokenizer_problem(theirs: str | None, ours: str | None, *, vocab_size: int) -> str | None:
    """Why two tokenizers (hub names or folders) aren't the same, None where they are, or where there is only one."""
    if theirs is None or ours is None or theirs == ours:
        return None
    try:
        one, other = (load_tokenizer(name, vocab_size=vocab_size) for name in (theirs, ours))
    except ValueError as error:
        return f"{theirs} there and {ours} here can't be compared: {error}"
    if one.get_vocab() != other.get_vocab() or one(_PROBES)["input_ids"] != other(_PROBES)["input_ids"]:
        return f"{ours} gives captions other token ids than {theirs}, which the weights were trained with"
    return None


def _different_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Fields with other values, those aside that are said elsewhere or don't matter."""
    there, here = flatten(theirs), flatten(ours)
    found = []
    for name in dict.fromkeys((*here, *there)):
        if _is_in(name, _SAID_ELSEWHERE + _OF_NO_CONSEQUENCE) or there.get(name) == here.get(name):
            continue
        if name.startswith("clap.") and not (name in there and name in here):
            continue  # of another version, or part of a section of another kind
        found.append(f"{name}: {there.get(name, 'not set')!r} there, {here.get(name, 'not set')!r} here")
    return found


def _is_in(name: str, sections: tuple[str, ...]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)
