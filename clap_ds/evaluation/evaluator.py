"""Evaluates a model as the `clap.evaluation` section describes it, during training and after.

Everything that can be wrong with the settings, the shards and their labels shows when an `Evaluator` is made, before any work
that could be lost. Reading clips is left to `clips`, their use to `plan`, features to `embed`, the metrics to `retrieval` and
`zero_shot`.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import EvaluationSettings
from clap_ds.data import shard_list
from clap_ds.data.shard_reader import Broken
from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.clips import list_clips, load_audio
from clap_ds.evaluation.embed import Embedder, evaluating
from clap_ds.evaluation.plan import FIELD, NUM_EXAMPLES, RetrievalPlan, ZeroShotPlan, plan_retrieval, plan_zero_shot
from clap_ds.evaluation.result import Evaluation, TaskResult
from clap_ds.evaluation.retrieval import evaluate_retrieval
from clap_ds.evaluation.zero_shot import class_features, evaluate_zero_shot
from clap_ds.model import tokenizer as caption_module
from clap_ds.model.clap import ClapModel

MAX_NOTES = 20  # lines about broken items at a time

T = TypeVar("T")


class Evaluator:
    """Retrieval and zero-shot classification on held-out clips. All ranks make theirs together, a collective.

    Args:
        settings: what to evaluate.
        model_config: of the models to come.
        tokenizer_name: hub name or folder.
        text_tokens: caption length, padding included.
        micro_batch: clips or captions per rank and forward pass.
        ranks: of the process group, or a single one without any.
        device: where the models are.

    Attributes:
        result: what the last run found, with chance levels and intervals; None before the first.

    Raises:
        ValueError: nothing to evaluate, missing shards or tokenizer, no usable clip, classes or templates that don't fit, ranks
            that see different clips. On all ranks alike.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        model_config: ClapConfig,
        tokenizer_name: str | None,
        text_tokens: int,
        micro_batch: int,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._text_tokens = text_tokens
        self._ranks = ranks
        self._device = device
        self._embedder = Embedder(ranks, device, micro_batch, settings.num_workers)
        self._broken: dict[Broken, None] = {}
        self.result: Evaluation | None = None
        problem = None
        try:
            self._tokenizer = _load_tokenizer(tokenizer_name, model_config)
            self._plan(settings, model_config)
        except ValueError as error:
            problem = str(error)
        self._agree(problem)

    def _agree(self, problem: str | None) -> None:
        """Raise the first rank's problem on all ranks; refuse ranks that see different clips."""
        clips = (
            [] if problem else [(clip.name, clip.size, str(clip.captions), str(clip.content)) for clip in self._clips]
        )
        digest = hashlib.blake2b(repr(clips).encode(), digest_size=16).hexdigest()
        found = self._embedder.gather_objects((problem, digest, len(clips)))
        for rank, (theirs, _, _) in enumerate(found):
            if theirs is not None:
                where = f"rank {rank}: " if any(each is None for each, _, _ in found) else ""
                raise ValueError(f"{where}{theirs}")
        if len({each for _, each, _ in found}) > 1:
            numbers = ", ".join(f"rank {rank}: {number}" for rank, (_, _, number) in enumerate(found))
            raise ValueError(f"{FIELD}: the ranks see different shards (clips by rank: {numbers})")

    def _plan(self, settings: EvaluationSettings, model_config: ClapConfig) -> None:
        retrieval, zero_shot = settings.retrieval, settings.zero_shot
        if retrieval is None and zero_shot is None:
            raise ValueError(f"{FIELD}: expected retrieval, zero_shot or both, found neither")
        shards = {
            name: _expand(f"{FIELD}.{name}.shards", task.shards)
            for name, task in (("retrieval", retrieval), ("zero_shot", zero_shot))
            if task is not None
        }
        self._clips, broken = list_clips(dict.fromkeys(itertools.chain.from_iterable(shards.values())))
        self._note(broken)
        clips = {
            name: [(number, clip) for number, clip in enumerate(self._clips) if clip.shard in own]
            for name, own in ((name, set(paths)) for name, paths in shards.items())
        }
        for name, own in clips.items():
            if not own:
                examples = "".join(f"; {each}" for each in list(self._broken)[:NUM_EXAMPLES])
                raise ValueError(
                    f"{FIELD}.{name}.shards: no item with audio in {len(shards[name])} shard(s), the first:"
                    f" {shards[name][0]}{examples}"
                )
        self._retrieval = plan_retrieval(clips["retrieval"], self._note) if retrieval else None
        self._zero_shot = plan_zero_shot(clips["zero_shot"], zero_shot, self._note) if zero_shot else None
        for name, plan in (("retrieval", self._retrieval), ("zero_shot", self._zero_shot)):
            if plan is not None:
                self._check_any_decodes(f"{FIELD}.{name}.shards", plan.clips, model_config)

    @property
    def num_batches(self) -> int:
        """Micro-batches of clips that the rank with most has, rank 0."""
        return -(-len(self._clips) // (self._ranks.world_size * self._embedder.micro_batch))

    def run(self, model: ClapModel) -> dict[str, float]:
        """Metrics of a model, 0 to 1. A collective; every rank gets the same.

        Leaves the model's mode and the random state as they were.

        Raises:
            ValueError: on all ranks: no clip can be decoded any more, or a decoding process is gone.
        """
        return self.evaluate(model).metrics

    def evaluate(
        self, model: ClapModel, *, resample: bool = False, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """As `run`, with chance levels, intervals and counts.

        Args:
            resample: find the interval of zero-shot's mean average precision, too, which takes a while.
            on_batch: called after each of this rank's micro-batches of clips.
        """
        tasks: dict[str, TaskResult] = {}
        with evaluating(model):
            audio, failed = self._embedder.clips(model, self._clips, on_batch)
            self._note(Broken(self._clips[number].name, reason) for number, reason in sorted(failed.items()))
            if self._retrieval is not None:
                tasks["retrieval"] = self._run_retrieval(model, self._retrieval, audio, failed)
            if self._zero_shot is not None:
                tasks["zero_shot"] = self._run_zero_shot(model, self._zero_shot, audio, failed, resample)
        self.result = Evaluation(tasks, list(self._broken))
        return self.result

    def _run_retrieval(
        self, model: ClapModel, plan: RetrievalPlan, audio: Tensor, failed: dict[int, str]
    ) -> TaskResult:
        used = _usable(f"{FIELD}.retrieval.shards", plan.clips, failed)
        captions = [plan.captions[place] for place in used]
        text = self._embed_captions(model, captions)
        clip_of_caption = torch.arange(len(used)).repeat_interleave(torch.tensor([len(each) for each in captions]))
        features = audio[[plan.clips[place] for place in used]]
        return evaluate_retrieval(features, text, clip_of_caption.to(self._device), self._ranks)

    def _run_zero_shot(
        self, model: ClapModel, plan: ZeroShotPlan, audio: Tensor, failed: dict[int, str], resample: bool
    ) -> TaskResult:
        used = _usable(f"{FIELD}.zero_shot.shards", plan.clips, failed)
        classes = class_features(plan.captions, self._embed_captions(model, plan.captions))
        is_of_class = torch.zeros(len(used), len(plan.captions), dtype=torch.bool)
        for row, place in enumerate(used):
            is_of_class[row, plan.classes_of_clip[place]] = True
        features = audio[[plan.clips[place] for place in used]]
        return evaluate_zero_shot(features, classes, is_of_class.to(self._device), self._ranks, resample=resample)

    def _embed_captions(self, model: ClapModel, captions: list[list[str]]) -> Tensor:
        flat = list(itertools.chain.from_iterable(captions))
        return self._embedder.captions(model, flat, self._tokenizer, self._text_tokens)

    def _check_any_decodes(self, field: str, numbers: list[int], model: ClapConfig) -> None:
        """Decode until one clip is sound, usually the first."""
        reasons = []
        for number in numbers:
            (waveform,) = load_audio([self._clips[number]], model.audio, num_workers=0)
            if isinstance(waveform, Tensor):
                return
            reasons.append(f"{self._clips[number].name}: {waveform}")
        raise ValueError(
            f"{field}: none of the {len(numbers)} clips can be decoded; the first: {'; '.join(reasons[:NUM_EXAMPLES])}"
        )

    def _note(self, found: Iterable[Broken]) -> None:
        """Count what is broken once; rank 0 says so."""
        new = [broken for broken in dict.fromkeys(found) if broken not in self._broken]
        self._broken |= dict.fromkeys(new)
        if self._ranks.is_first:
            for broken in new[:MAX_NOTES]:
                print(f"{FIELD}: skipped {broken}", file=sys.stderr, flush=True)
            if len(new) > MAX_NOTES:
                print(f"{FIELD}: skipped {len(new) - MAX_NOTES} more", file=sys.stderr, flush=True)


def _usable(field: str, clips: list[int], failed: dict[int, str]) -> list[int]:
    """Places in `clips` of those that could be decoded."""
    used = [place for place, number in enumerate(clips) if number not in failed]
    if not used:
        raise ValueError(f"{field}: none of the {len(clips)} clips can be decoded: {failed[clips[0]]}")
    return used


def _load_tokenizer(name: str | None, model: ClapConfig) -> PreTrainedTokenizerBase:
    field = f"{FIELD}.tokenizer"
    if name is None:
        raise ValueError(f"{field}: missing: the tokenizer that the model's captions are for")
    return _renamed(
        field, caption_module.FIELD, lambda: caption_module.load_tokenizer(name, vocab_size=model.text.vocab_size)
    )


def _expand(field: str, patterns: str | list[str]) -> list[str]:
    return [str(shard) for shard in _renamed(field, shard_list.FIELD, lambda: shard_list.expand_shards(patterns))]


def _renamed(field: str, theirs: str, build: Callable[[], T]) -> T:
    """What `build` gives; its errors are about `field`, not the training data's."""
    try:
        return build()
    except ValueError as error:
        raise ValueError(str(error).replace(theirs, field)) from None
