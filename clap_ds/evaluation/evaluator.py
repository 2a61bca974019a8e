"""Evaluates a model as the `clap.evaluation` section describes it, during training and after.

Everything that can be wrong with the settings, the shards and their labels shows when an `Evaluator` is made, before any work
that could be lost. The model runs as in use: evaluation mode, no gradients, its own dtype; features are fp32. Each rank embeds
its share, in micro-batches that are always full, the last filled up with zeros or empty captions, so that a compiled model
meets one shape.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from clap_ds.config.errors import AgreedError
from clap_ds.config.metrics import LOSS
from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import EvaluationSettings
from clap_ds.data import shard_list
from clap_ds.data.broken import Broken
from clap_ds.data.shard_manifest import kind_of
from clap_ds.evaluation.clips import (
    FIELD,
    NUM_EXAMPLES,
    Plan,
    empty_rows,
    list_clips,
    load_audio,
    plan_retrieval,
    plan_zero_shot,
)
from clap_ds.evaluation.metrics import (
    Evaluation,
    TaskResult,
    class_features,
    evaluate_retrieval,
    evaluate_zero_shot,
    retrieval_loss,
)
from clap_ds.model import tokenizer
from clap_ds.model.clap import ClapModel
from clap_ds.ranks.agreement import gather, gather_tensor, on_first, together
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.watch import alive, doing

MAX_NOTES = 20  # lines about broken items at a time


class NonFiniteEmbeddingsError(ValueError):
    """A model whose weights are finite, and what it makes of clips isn't."""


@dataclass
class Evaluator:
    """Retrieval and zero-shot classification on held-out clips. All ranks make theirs together, a collective.

    Attributes:
        model_config: of the models to come, which are on `device`.
        tokenizer_name: hub name or folder.
        text_tokens: caption length, padding included.
        micro_batch: clips or captions per rank and forward pass.
        loss_kind: `clap.loss.kind` that the model was trained with.
        ranks: of the process group, or a single one without any.

    Raises:
        AgreedError: on all ranks: nothing to evaluate, missing shards or tokenizer, no usable clip, classes or templates that
            don't fit, ranks that see different clips.
    """

    settings: EvaluationSettings
    _: KW_ONLY
    model_config: ClapConfig
    tokenizer_name: str | None
    text_tokens: int
    micro_batch: int
    loss_kind: str
    ranks: Ranks
    device: torch.device

    def __post_init__(self) -> None:
        self._broken: dict[Broken, None] = {}
        self._plans: dict[str, Plan] = {}
        together(lambda: on_first(self._load_tokenizer))  # one rank asks a hub that may not answer
        together(self._prepare)
        found = gather((hashlib.sha256(repr(self._clips).encode()).digest(), len(self._clips)))
        if len(set(found)) > 1:
            numbers = ", ".join(f"rank {rank}: {number}" for rank, (_, number) in enumerate(found))
            raise AgreedError(f"{FIELD}: the ranks see different shards (clips by rank: {numbers})")

    def _load_tokenizer(self) -> None:
        field, vocab_size = f"{FIELD}.tokenizer", self.model_config.text.vocab_size
        if self.tokenizer_name is None:
            raise ValueError(f"{field}: missing: the tokenizer that the model's captions are for")
        self._tokenizer = tokenizer.load_tokenizer(self.tokenizer_name, vocab_size=vocab_size, field=field)

    def _prepare(self) -> None:
        if self.ranks.rank:
            self._load_tokenizer()
        chosen = {"retrieval": self.settings.retrieval, "zero_shot": self.settings.zero_shot}
        shards: dict[str, list[str]] = {}
        for task, settings in chosen.items():
            if settings is not None:
                with _about(f"{FIELD}.{task}.shards", shard_list.FIELD):
                    shards[task] = shard_list.expand_shards(settings.shards)
        if not shards:
            raise ValueError(f"{FIELD}: expected retrieval, zero_shot or both, found neither")
        tars = list(dict.fromkeys(itertools.chain.from_iterable(shards.values())))
        with _about(" and ".join(f"{FIELD}.{task}.shards" for task in shards), shard_list.FIELD):
            self._kind = kind_of([shard_list.Source(tars, 1.0)], self.model_config)
        self._clips, broken = list_clips(tars, self._kind)
        self._note(broken)
        for task, paths in shards.items():
            field, own = f"{FIELD}.{task}.shards", set(paths)
            clips = {number: clip for number, clip in enumerate(self._clips) if clip.shard in own}
            if not clips:
                examples = "; ".join([paths[0], *map(str, list(self._broken)[:NUM_EXAMPLES])])
                raise ValueError(f"{field}: no item with audio in {len(paths)} shard(s), the first: {examples}")
            settings = self.settings.zero_shot if task == "zero_shot" else None
            self._plans[task] = (
                plan_zero_shot(clips, settings, self._note) if settings else plan_retrieval(clips, self._note)
            )
            self._check_any_decodes(field, self._plans[task].clips)

    def _check_any_decodes(self, field: str, numbers: list[int]) -> None:
        """Decode until one clip is sound, usually the first."""
        reasons = []
        for number in numbers:
            (found,) = load_audio([self._clips[number]], self.model_config.audio, num_workers=0, kind=self._kind)
            if isinstance(found, Tensor):
                return
            reasons.append(f"{self._clips[number].name}: {found}")
        examples = "; ".join(reasons[:NUM_EXAMPLES])
        raise ValueError(f"{field}: none of the {len(numbers)} clips can be decoded; the first: {examples}")

    @property
    def num_batches(self) -> int:
        """Micro-batches of clips that the rank with most has, rank 0."""
        return -(-len(self._clips) // (self.ranks.world_size * self.micro_batch))

    @doing("evaluating")
    def evaluate(
        self, model: ClapModel, *, resample: bool = False, on_batch: Callable[[int], object] = lambda done: None
    ) -> Evaluation:
        """Metrics of a model with chance levels, intervals and counts. A collective; every rank gets the same.

        Leaves the model's mode and the random state as they were.

        Args:
            resample: find the interval of zero-shot's mean average precision, too, which takes a while.
            on_batch: called after each of this rank's micro-batches of clips with how many are done.

        Raises:
            ValueError: on all ranks: no clip can be decoded any more, or embeddings aren't finite.
            AgreedError: a decoding process is gone.
        """
        with _evaluating(model):
            audio, failed = self._embed_clips(model, on_batch)
            if not audio[[number for number in range(len(audio)) if number not in failed]].isfinite().all():
                raise NonFiniteEmbeddingsError("the model's embeddings of clips are NaN or infinite: it has diverged")
            self._note(Broken(self._clips[number].name, reason) for number, reason in sorted(failed.items()))
            tasks = {}
            for name, plan in self._plans.items():
                used = [place for place, number in enumerate(plan.clips) if number not in failed]
                if not used:
                    nothing = f"none of the {len(plan.clips)} clips can be decoded: {failed[plan.clips[0]]}"
                    raise ValueError(f"{FIELD}.{name}.shards: {nothing}")
                features = audio[[plan.clips[place] for place in used]]
                if plan.classes is None:
                    tasks[name] = self._retrieval(model, features, [plan.captions[place] for place in used])
                else:
                    classes = class_features(plan.captions, self._embed_captions(model, plan.captions))
                    is_of_class = torch.zeros(len(used), len(plan.captions), dtype=torch.bool)
                    for row, place in zip(is_of_class, used, strict=True):
                        row[plan.classes[place]] = True
                    is_of_class = is_of_class.to(self.device)
                    tasks[name] = evaluate_zero_shot(features, classes, is_of_class, self.ranks, resample=resample)
        return Evaluation(tasks, list(self._broken))

    def _retrieval(self, model: ClapModel, audio: Tensor, captions: list[list[str]]) -> TaskResult:
        clip_of_caption = torch.arange(len(captions)).repeat_interleave(torch.tensor([len(each) for each in captions]))
        text = self._embed_captions(model, captions)
        found = evaluate_retrieval(audio, text, clip_of_caption.to(self.device), self.ranks)
        first = clip_of_caption.diff(prepend=torch.tensor([-1])).bool().to(self.device)
        scalars = model.logit_scale.float().exp(), model.logit_bias
        pairs = audio, text[first], [each[0] for each in captions]
        found.measures[LOSS] = retrieval_loss(self.loss_kind, *pairs, *scalars)
        return found

    def _embed_clips(self, model: ClapModel, on_batch: Callable[[int], object]) -> tuple[Tensor, dict[int, str]]:
        """Features of all clips, (N, D) fp32, and why those that can't be decoded can't, by number; their rows mean nothing."""
        config, failed, batches = model.config.audio, dict[int, str](), itertools.count(1)
        own = self._clips[self.ranks.rank :: self.ranks.world_size]
        loaded = load_audio(own, config, num_workers=self.settings.num_workers, kind=self._kind)

        def encode(numbers: range) -> Tensor:
            audio = empty_rows(self.micro_batch, config, self._kind)
            for row, (number, found) in enumerate(zip(numbers, loaded, strict=False)):
                if isinstance(found, str):
                    failed[number] = found
                else:
                    audio[row] = found
            features = model.encode_audio(audio.to(self.device).float())
            on_batch(next(batches))
            alive()
            return features

        features = self._embed(len(self._clips), encode)
        return features, {number: reason for theirs in gather(failed) for number, reason in theirs.items()}

    def _embed_captions(self, model: ClapModel, captions_of_each: list[list[str]]) -> Tensor:
        """Features of all captions, (M, D) fp32."""
        captions = list(itertools.chain.from_iterable(captions_of_each))

        def encode(numbers: range) -> Tensor:
            filled = [captions[number] for number in numbers] + [""] * (self.micro_batch - len(numbers))
            ids, mask = tokenizer.tokenize(filled, self._tokenizer, self.text_tokens)
            return model.encode_text(ids.to(self.device), mask.to(self.device))

        return self._embed(len(captions), encode)

    def _embed(self, total: int, encode: Callable[[range], Tensor]) -> Tensor:
        """(total, D) fp32 features of things that ranks take turns with: `encode` gives those of a micro-batch, by their
        numbers. An AgreedError on all ranks where that is a ValueError on any."""
        own, size = range(self.ranks.rank, total, self.ranks.world_size), self.micro_batch
        rows = torch.zeros(-(-total // self.ranks.world_size), self.model_config.joint_dim, device=self.device)

        def embed_own() -> None:
            for start in range(0, len(own), size):
                numbers = own[start : start + size]
                rows[start : start + len(numbers)] = encode(numbers)[: len(numbers)].float()

        together(embed_own)
        return gather_tensor(rows).transpose(0, 1).flatten(0, 1)[:total]

    def _note(self, found: Iterable[Broken]) -> None:
        """Count what is broken once; rank 0 says so."""
        new = [broken for broken in dict.fromkeys(found) if broken not in self._broken]
        self._broken |= dict.fromkeys(new)
        if self.ranks.is_first:
            shown = [str(broken) for broken in new[:MAX_NOTES]]
            for text in shown + [f"{len(new) - MAX_NOTES} more"] * (len(new) > MAX_NOTES):
                print(f"{FIELD}: skipped {text}", file=sys.stderr, flush=True)


@contextmanager
def _evaluating(model: ClapModel) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _about(field: str, theirs: str) -> Iterator[None]:
    """Errors within are about `field`, not the training data's."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(theirs, field)) from None
