"""Evaluate a model by the `clap.evaluation` section, during training and afterwards.

Constructing an `Evaluator` detects mistakes in settings, shards and labels. Clips and captions are
interleaved over ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import LOSS, EvaluationSettings
from clap_ds.data.clip import Broken
from clap_ds.data.shard_manifest import expand_shards, kind_of
from clap_ds.distributed.collectives import raise_on_all_ranks, reduce_on_rank0, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import activity, alive
from clap_ds.evaluation import metrics
from clap_ds.evaluation.clips import (
    FIELD,
    Plan,
    empty_row,
    list_clips,
    load_audio,
    plan_retrieval,
    plan_zero_shot,
)
from clap_ds.evaluation.embedding import class_features, embed_audio, embed_text, tokenizer_of
from clap_ds.evaluation.metrics import Evaluation, Measure, TaskResult
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.utils.errors import CollectiveUserError, printable

MAX_NOTES = 20  # lines about broken items


class NonFiniteEmbeddingsError(ValueError):
    """Raised for non-finite embeddings of a model with finite weights."""


@dataclass
class Evaluator:
    """Evaluate retrieval and zero-shot classification on held-out clips. `loss_kind` is training's
    `clap.loss.kind`. Constructing it is a collective. Raises CollectiveUserError if something is
    missing or doesn't fit."""

    settings: EvaluationSettings
    _: KW_ONLY
    model_config: ClapConfig
    tokenizer_name: str | None
    context_length: int
    micro_batch: int
    loss_kind: str
    ranks: Ranks

    def __post_init__(self) -> None:
        self._broken: dict[Broken, None] = {}
        with raise_on_all_ranks():
            run_on_rank0(
                self._load_tokenizer
            )  # only one rank contacts the Hub, which may be unreachable
        with raise_on_all_ranks():
            self._prepare()
        digest = hashlib.sha256(repr(self._clips).encode()).hexdigest()
        if reduce_on_rank0(digest, lambda found: len(set(found)) > 1):
            raise CollectiveUserError(f"{FIELD}: the ranks see different shards")

    def _load_tokenizer(self) -> None:
        self._tokenizer = tokenizer_of(
            self.tokenizer_name, self.model_config.text, f"{FIELD}.tokenizer"
        )

    def _prepare(self) -> None:
        if self.ranks.rank:
            self._load_tokenizer()
        tasks = {"retrieval": self.settings.retrieval, "zero_shot": self.settings.zero_shot}
        named = {
            task: (f"{FIELD}.{task}.shards", settings)
            for task, settings in tasks.items()
            if settings
        }
        if not named:
            raise ValueError(f"{FIELD}: expected retrieval, zero_shot or both, found neither")
        shards = {
            task: expand_shards(settings.shards, field) for task, (field, settings) in named.items()
        }
        tars = list(dict.fromkeys(chain(*shards.values())))
        fields = " and ".join(field for field, _ in named.values())
        self._kind = kind_of(tars, self.model_config, fields, warns=self.ranks.is_main_process)
        self._clips, broken = list_clips(tars, self._kind)
        self._note(broken)
        self._plans: dict[str, Plan] = {}
        for task, paths in shards.items():
            own = set(paths)
            clips = {number: clip for number, clip in enumerate(self._clips) if clip.shard in own}
            plan: Any = plan_zero_shot if task == "zero_shot" else plan_retrieval
            self._plans[task], broken = plan(clips, named[task][1])
            self._note(broken)

    @activity("evaluating")
    def evaluate(self, model: ContrastiveModel) -> Evaluation:
        """Compute metrics with chance levels, intervals and counts. A collective.

        All ranks get the same result. Raises ValueError if no clip can be decoded or embeddings
          aren't finite.
        """
        audio, failed = self._embed_clips(model)
        if (
            not audio[[number for number in range(len(audio)) if number not in failed]]
            .isfinite()
            .all()
        ):
            raise NonFiniteEmbeddingsError(
                "the model's embeddings of clips are NaN or infinite: training has diverged"
            )
        self._note(
            Broken(self._clips[number].name, reason) for number, reason in sorted(failed.items())
        )
        tasks = {}
        for name, plan in self._plans.items():
            used = [place for place, number in enumerate(plan.clips) if number not in failed]
            if not used:
                nothing = (
                    f"none of the {len(plan.clips)} clips can be decoded: {failed[plan.clips[0]]}"
                )
                raise ValueError(f"{FIELD}.{name}.shards: {nothing}")
            numbers = [plan.clips[place] for place in used]
            captions = plan.captions if plan.classes else [plan.captions[place] for place in used]
            text = self._embed_captions(model, captions)
            if plan.classes is None:
                counts = {"captions": len(text)}
                measures = self._retrieval(model, audio[numbers], text, captions)
            else:
                is_of_class = torch.zeros(len(used), len(captions), dtype=torch.bool)
                for row, place in zip(is_of_class, used, strict=True):
                    row[plan.classes[place]] = True
                pairs = audio[numbers], class_features(captions, text), is_of_class.to(audio.device)
                counts = {"classes": len(captions)}
                measures = metrics.evaluate_zero_shot(*pairs, self.ranks)
            tasks[name] = TaskResult({"clips": len(used), **counts}, measures)
        return Evaluation(tasks, list(self._broken))

    @torch.no_grad()
    def _retrieval(
        self, model: ContrastiveModel, audio: Tensor, text: Tensor, captions: list[list[str]]
    ) -> dict[str, Measure]:
        numbers = torch.tensor([len(each) for each in captions], device=audio.device)
        clip_of_caption = torch.arange(len(captions), device=audio.device).repeat_interleave(
            numbers
        )
        pairs = audio, text[numbers.cumsum(0) - numbers], [each[0] for each in captions]
        loss = metrics.retrieval_loss(
            self.loss_kind, *pairs, model.logit_scale.float().exp(), model.logit_bias
        )
        return metrics.evaluate_retrieval(audio, text, clip_of_caption, self.ranks) | {LOSS: loss}

    def _embed_clips(self, model: ContrastiveModel) -> tuple[Tensor, dict[int, str]]:
        """Embed all clips: (N, D) fp32, and the reasons for undecodable ones by index, whose rows
        are meaningless."""
        own = range(self.ranks.rank, len(self._clips), self.ranks.world_size)
        audio = model.config.audio
        failed = dict[int, str]()

        def rows() -> Iterator[Tensor]:
            clips = [self._clips[number] for number in own]
            loaded = load_audio(
                clips, audio, num_workers=self.settings.num_workers, kind=self._kind
            )
            shown = tqdm(
                loaded,
                "clips",
                len(clips),
                unit="clip",
                disable=None if self.ranks.is_main_process else True,
            )
            for number, found in zip(own, shown, strict=True):
                alive()
                if isinstance(found, str):
                    failed[number] = found
                yield empty_row(audio, self._kind) if isinstance(found, str) else found

        features = self._shared(
            len(self._clips), lambda: embed_audio(model, rows(), self.micro_batch)
        )
        return features, dict(
            reduce_on_rank0([*failed.items()], lambda by_rank: [*chain(*by_rank)])
        )

    def _embed_captions(self, model: ContrastiveModel, captions_of_each: list[list[str]]) -> Tensor:
        captions = [*chain(*captions_of_each)]
        own = captions[self.ranks.rank :: self.ranks.world_size]

        def embed() -> Tensor:
            return embed_text(model, own, self._tokenizer, self.context_length, self.micro_batch)

        return self._shared(len(captions), embed)

    def _shared(self, total: int, embed_own: Callable[[], Tensor]) -> Tensor:
        """Gather (total, D) features of items interleaved over ranks. A rank's ValueError raises
        CollectiveUserError on all."""
        with raise_on_all_ranks():
            own = embed_own()
        rows = own.new_zeros(-(-total // self.ranks.world_size), own.shape[1])
        rows[: len(own)] = own
        everyone = rows.repeat(self.ranks.world_size, 1, 1)
        if self.ranks.world_size > 1:
            dist.all_gather([*everyone], rows)
        return everyone.transpose(0, 1).flatten(0, 1)[:total]

    def _note(self, found: Iterable[Broken]) -> None:
        new = [broken for broken in dict.fromkeys(found) if broken not in self._broken]
        self._broken |= dict.fromkeys(new)
        if self.ranks.is_main_process:
            for broken in new[:MAX_NOTES]:
                print(f"{FIELD}: skipped {printable(str(broken))}", file=sys.stderr, flush=True)
