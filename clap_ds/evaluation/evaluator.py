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
from clap_ds.data.workers import WorkerError
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
        if self.tokenizer_name is None:
            raise ValueError(f"{FIELD}.tokenizer: missing: the tokenizer that the model's captions are for")
        with _about(f"{FIELD}.tokenizer", tokenizer.FIELD):
            vocab_size = self.model_config.text.vocab_size
            self._tokenizer = tokenizer.load_tokenizer(self.tokenizer_name, vocab_size=vocab_size)

    def _prepare(self) -> None:
        if self.ranks.rank:
            self._load_tokenizer()
        shards: dict[str, list[str]] = {}
        for task, chosen in (("retrieval", self.settings.retrieval), ("zero_shot", self.settings.zero_shot)):
            with _about(f"{FIELD}.{task}.shards", shard_list.FIELD):
                shards |= {task: shard_list.expand_shards(chosen.shards)} if chosen else {}
        if not shards:
            raise ValueError(f"{FIELD}: expected retrieval, zero_shot or both, found neither")
        tars = list(dict.fromkeys(itertools.chain.from_iterable(shards.values())))
        with _about(" and ".join(f"{FIELD}.{task}.shards" for task in shards), shard_list.FIELD):
            self._kind = kind_of([shard_list.Source(tars, 1.0)], self.model_config)
        self._clips, broken = list_clips(tars, self._kind)
        self._note(broken)
        for task, paths in shards.items():
            own = set(paths)
            clips = {number: clip for number, clip in enumerate(self._clips) if clip.shard in own}
            if not clips:
                examples = "; ".join([paths[0], *map(str, list(self._broken)[:NUM_EXAMPLES])])
                nothing = f"no item with audio in {len(paths)} shard(s), the first: {examples}"
                raise ValueError(f"{FIELD}.{task}.shards: {nothing}")
            if task == "retrieval":
                self._plans[task] = plan_retrieval(clips, self._note)
            elif self.settings.zero_shot is not None:
                self._plans[task] = plan_zero_shot(clips, self.settings.zero_shot, self._note)
            self._check_any_decodes(f"{FIELD}.{task}.shards", self._plans[task].clips)

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
            ValueError: on all ranks: no clip can be decoded any more, a decoding process is gone, or embeddings aren't finite.
        """
        with _evaluating(model):
            audio, failed = self._embed_clips(model, on_batch)
            if not audio[[number for number in range(len(audio)) if number not in failed]].isfinite().all():
                raise NonFiniteEmbeddingsError("the model's embeddings of clips are NaN or infinite: it has diverged")
            self._note(Broken(self._clips[number].name, reason) for number, reason in sorted(failed.items()))
            tasks = {name: self._run(name, plan, model, audio, failed, resample) for name, plan in self._plans.items()}
        return Evaluation(tasks, list(self._broken))

    def _run(
        self, name: str, plan: Plan, model: ClapModel, audio: Tensor, failed: dict[int, str], resample: bool
    ) -> TaskResult:
        used = [place for place, number in enumerate(plan.clips) if number not in failed]
        if not used:
            nothing = f"none of the {len(plan.clips)} clips can be decoded: {failed[plan.clips[0]]}"
            raise ValueError(f"{FIELD}.{name}.shards: {nothing}")
        features = audio[[plan.clips[place] for place in used]]
        if plan.classes is None:
            captions = [plan.captions[place] for place in used]
            clip_of_caption = torch.arange(len(used)).repeat_interleave(torch.tensor([len(each) for each in captions]))
            text = self._embed_captions(model, captions)
            found = evaluate_retrieval(features, text, clip_of_caption.to(self.device), self.ranks)
            first = clip_of_caption.diff(prepend=torch.tensor([-1])).bool().to(self.device)
            scalars = model.logit_scale.float().exp(), model.logit_bias
            pairs = features, text[first], [each[0] for each in captions]
            found.measures[LOSS] = retrieval_loss(self.loss_kind, *pairs, *scalars)
            return found
        classes = class_features(plan.captions, self._embed_captions(model, plan.captions))
        is_of_class = torch.zeros(len(used), len(plan.captions), dtype=torch.bool)
        for row, place in zip(is_of_class, used, strict=True):
            row[plan.classes[place]] = True
        return evaluate_zero_shot(features, classes, is_of_class.to(self.device), self.ranks, resample=resample)

    def _embed_clips(self, model: ClapModel, on_batch: Callable[[int], object]) -> tuple[Tensor, dict[int, str]]:
        """Features of all clips, (N, D) fp32, and why those that can't be decoded can't, by number; their rows mean nothing."""
        own = range(self.ranks.rank, len(self._clips), self.ranks.world_size)
        clips, num_workers = [self._clips[number] for number in own], self.settings.num_workers
        loaded = load_audio(clips, model.config.audio, num_workers=num_workers, kind=self._kind)
        rows, broken, problem = [], {}, None
        try:
            for start in range(0, len(own), self.micro_batch):
                numbers = own[start : start + self.micro_batch]
                audio = empty_rows(self.micro_batch, model.config.audio, self._kind)
                for row, (number, found) in enumerate(zip(numbers, loaded, strict=False)):
                    if isinstance(found, str):
                        broken[number] = found
                    else:
                        audio[row] = found
                rows.append(model.encode_audio(audio.to(self.device).float())[: len(numbers)])
                on_batch(len(rows))
                alive()
        except WorkerError as error:
            problem = f"rank {self.ranks.rank}: {error}"
        failed: dict[int, str] = {}
        for theirs, their_problem in gather((broken, problem)):
            if their_problem is not None:
                raise WorkerError(their_problem)
            failed |= theirs
        return self._gather(rows, len(self._clips)), failed

    def _embed_captions(self, model: ClapModel, captions_of_each: list[list[str]]) -> Tensor:
        """Features of all captions, (M, D) fp32."""
        everyones = list(itertools.chain.from_iterable(captions_of_each))
        own = everyones[self.ranks.rank :: self.ranks.world_size]
        rows = []
        for start in range(0, len(own), self.micro_batch):
            piece = own[start : start + self.micro_batch]
            filled = piece + [""] * (self.micro_batch - len(piece))
            ids, mask = tokenizer.tokenize(filled, self._tokenizer, self.text_tokens)
            rows.append(model.encode_text(ids.to(self.device), mask.to(self.device))[: len(piece)])
        return self._gather(rows, len(everyones))

    def _gather(self, rows: list[Tensor], number: int) -> Tensor:
        """(number, D): all ranks' rows, in the order of the things they took turns with."""
        own = torch.zeros(-(-number // self.ranks.world_size), self.model_config.joint_dim, device=self.device)
        if rows:
            found = torch.cat(rows).float()
            own[: len(found)] = found
        return gather_tensor(own).transpose(0, 1).flatten(0, 1)[:number]

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
