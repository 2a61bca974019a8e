"""Evaluate a model by the `clap.evaluation` section, during training and afterwards.

Constructing an `Evaluator` detects mistakes in settings, shards and labels. Clips and captions are
interleaved over ranks.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import RETRIEVAL_LOSS, EvaluationSettings
from clap_ds.data.clip import SkippedSample
from clap_ds.data.shard_manifest import expand_shards, kind_of
from clap_ds.distributed.collectives import raise_on_all_ranks, reduce_on_rank0, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import activity, alive
from clap_ds.engine.compile import first_error
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.loss import LOSSES
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
from clap_ds.evaluation.embedding import (
    class_features,
    embed_audio,
    embed_text,
    load_model_tokenizer,
)
from clap_ds.evaluation.metrics import Evaluation, Measure, TaskResult
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.utils.errors import CollectiveUserError, printable

# Most lines about broken items that are printed at a time.
MAX_NOTES = 20


@dataclass
class Evaluator:
    """Retrieval and zero-shot classification on held-out clips.

    Constructing it is a collective. Raises CollectiveUserError if something is missing or doesn't
    fit.

    Attributes:
        loss_kind: training's `clap.loss.kind`.
    """

    settings: EvaluationSettings
    _: KW_ONLY
    model_config: ClapConfig
    tokenizer_name: str | None
    context_length: int
    micro_batch: int
    loss_kind: str
    ranks: Ranks

    def __post_init__(self) -> None:
        # Whether the towers run uncompiled, as compiling them for evaluation has failed.
        self._runs_uncompiled = False
        # Unusable items in order, without duplicates: tasks may share clips.
        self._broken: dict[SkippedSample, None] = {}
        if self.loss_kind not in LOSSES:
            raise CollectiveUserError(
                f"the model was trained with the loss {self.loss_kind!r}; this version has"
                f" {', '.join(LOSSES)}"
            )
        # Only one rank contacts the Hub, which may be unreachable; the others use its cache.
        with raise_on_all_ranks():
            run_on_rank0(self._load_tokenizer)
        with raise_on_all_ranks():
            if self.ranks.rank != 0:
                self._load_tokenizer()
            self._plan_tasks()
        # Ranks that gather different clips would mix up features.
        digest = hashlib.sha256(repr(self._clips).encode()).hexdigest()
        if reduce_on_rank0(digest, lambda digests: len(set(digests)) > 1):
            raise CollectiveUserError(f"{FIELD}: the ranks see different shards")

    def _load_tokenizer(self) -> None:
        self._tokenizer = load_model_tokenizer(
            self.tokenizer_name, self.model_config.text, f"{FIELD}.tokenizer"
        )

    def _plan_tasks(self) -> None:
        """List the clips of all tasks, which share some, and plan each task."""
        sections: dict[str, Any] = {
            "retrieval": self.settings.retrieval,
            "zero_shot": self.settings.zero_shot,
        }
        sections = {task: section for task, section in sections.items() if section}
        shards = {
            task: expand_shards(section.shards, f"{FIELD}.{task}.shards")
            for task, section in sections.items()
        }
        tars = list(dict.fromkeys(chain(*shards.values())))
        fields = " and ".join(f"{FIELD}.{task}.shards" for task in sections)
        self._kind = kind_of(tars, self.model_config, fields, warns=self.ranks.is_main_process)
        self._clips, broken = list_clips(tars, self._kind)
        self._note(broken)
        self._plans: dict[str, Plan] = {}
        for task, section in sections.items():
            # Indices into all clips, whose audio is embedded once for all tasks.
            of_task = set(shards[task])
            clips = {index: clip for index, clip in enumerate(self._clips) if clip.shard in of_task}
            plan = plan_zero_shot if task == "zero_shot" else plan_retrieval
            self._plans[task], broken = plan(clips, section)
            self._note(broken)

    def try_compiled(self, model: ContrastiveModel) -> str | None:
        """Embed a silent clip and an empty caption, so that a compiled model is compiled for
        evaluation, too.

        If that fails on any rank, evaluations run uncompiled on all, and the reason is returned. A
        collective.
        """

        def embed() -> None:
            clips = [empty_row(model.config.audio, self._kind)]
            embed_audio(model, clips, self.micro_batch)
            embed_text(model, [""], self._tokenizer, self.context_length, self.micro_batch)

        is_first = self.ranks.local_rank == 0
        with activity("compiling"):
            problem = first_error(embed, is_first) or first_error(embed, not is_first)
        self._runs_uncompiled = problem is not None
        if problem and self.ranks.is_main_process:
            print(f"warning: evaluations can't be compiled and run slower: {problem}", flush=True)
        return problem

    def evaluate_engine(self, engine: ClapEngine) -> Evaluation:
        """Evaluate the averaged weights, if there are any, else the model's. A collective, like
        `evaluate`."""
        # Ranks' batch norms have seen different data, so all take rank 0's statistics.
        engine.broadcast_bn_statistics()
        try:
            with (
                engine.ema.in_place() if engine.ema is not None else nullcontext(),
                torch.compiler.set_stance("force_eager" if self._runs_uncompiled else "default"),
            ):
                return self.evaluate(engine.model)
        except NonFiniteError as error:
            raise NonFiniteError(f"after step {engine.steps} {error}") from None

    @activity("evaluating")
    def evaluate(self, model: ContrastiveModel) -> Evaluation:
        """Compute metrics with chance levels, intervals and counts. A collective.

        All ranks get the same result, but different devices may differ in the last bit.

        Raises:
            ValueError: if no clip can be decoded.
            NonFiniteError: if embeddings of a model with finite weights aren't finite.
        """
        audio_ND, failed = self._embed_clips(model)
        decoded = [index for index in range(len(audio_ND)) if index not in failed]
        if not audio_ND[decoded].isfinite().all():
            raise NonFiniteError(
                "the model's embeddings of clips are NaN or infinite: training has diverged"
            )
        self._note(
            SkippedSample(self._clips[index].name, reason)
            for index, reason in sorted(failed.items())
        )
        tasks = {name: self._evaluate_task(name, model, audio_ND, failed) for name in self._plans}
        return Evaluation(tasks, list(self._broken))

    def _evaluate_task(
        self, name: str, model: ContrastiveModel, audio_ND: Tensor, failed: dict[int, str]
    ) -> TaskResult:
        plan = self._plans[name]
        # Rows of the plan whose clips could be decoded, and these clips.
        rows = [row for row, index in enumerate(plan.clips) if index not in failed]
        if not rows:
            reason = failed[plan.clips[0]]
            raise ValueError(
                f"{FIELD}.{name}.shards: none of the {len(plan.clips)} clips can be decoded:"
                f" {reason}"
            )
        audio_ND = audio_ND[[plan.clips[row] for row in rows]]
        counts = {"clips": len(rows)}
        if plan.classes is None:
            captions = [plan.captions[row] for row in rows]
            text_MD = self._embed_captions(model, captions)
            counts["captions"] = len(text_MD)
            return TaskResult(counts, self._retrieval(model, audio_ND, text_MD, captions))
        text_MD = self._embed_captions(model, plan.captions)
        counts["classes"] = len(plan.captions)
        # Clips may have several classes.
        is_of_class_NK = torch.zeros(len(rows), len(plan.captions), dtype=torch.bool)
        for is_of_class_K, row in zip(is_of_class_NK, rows, strict=True):
            is_of_class_K[plan.classes[row]] = True
        measures = metrics.evaluate_zero_shot(
            audio_ND,
            class_features(plan.captions, text_MD),
            is_of_class_NK.to(audio_ND.device),
            self.ranks,
        )
        return TaskResult(counts, measures)

    @torch.no_grad()
    def _retrieval(
        self,
        model: ContrastiveModel,
        audio_ND: Tensor,
        text_MD: Tensor,
        captions_by_clip: list[list[str]],
    ) -> dict[str, Measure]:
        counts_N = torch.tensor([len(captions) for captions in captions_by_clip])
        counts_N = counts_N.to(audio_ND.device)
        clips_N = torch.arange(len(captions_by_clip), device=audio_ND.device)
        measures = metrics.evaluate_retrieval(
            audio_ND, text_MD, clips_N.repeat_interleave(counts_N), self.ranks
        )
        # The loss is of each clip's first caption.
        first_captions_N = counts_N.cumsum(0) - counts_N
        measures[RETRIEVAL_LOSS] = metrics.retrieval_loss(
            self.loss_kind,
            audio_ND,
            text_MD[first_captions_N],
            [captions[0] for captions in captions_by_clip],
            model.logit_scale.float().exp(),
            model.logit_bias,
        )
        return measures

    def _embed_clips(self, model: ContrastiveModel) -> tuple[Tensor, dict[int, str]]:
        """Embed all clips: (N, D) fp32, and the reasons for undecodable ones by index, whose rows
        are meaningless."""
        # Indices of this rank's clips.
        indices = range(self.ranks.rank, len(self._clips), self.ranks.world_size)
        audio = model.config.audio
        failed: dict[int, str] = {}

        def load_rows() -> Iterator[Tensor]:
            clips = [self._clips[index] for index in indices]
            rows = load_audio(clips, audio, num_workers=self.settings.num_workers, kind=self._kind)
            # None: only on a terminal.
            is_disabled = None if self.ranks.is_main_process else True
            progress = tqdm(rows, "clips", len(clips), unit="clip", disable=is_disabled)
            # The watchdog would take decoding many clips for a hang.
            for index, row in zip(indices, progress, strict=True):
                alive()
                if isinstance(row, str):
                    failed[index] = row
                    yield empty_row(audio, self._kind)
                else:
                    yield row

        features_ND = self._gather_features(
            len(self._clips), lambda: embed_audio(model, load_rows(), self.micro_batch)
        )
        # All ranks must leave out the same clips.
        failures = reduce_on_rank0([*failed.items()], lambda by_rank: [*chain(*by_rank)])
        return features_ND, dict(failures)

    def _embed_captions(self, model: ContrastiveModel, captions_by_row: list[list[str]]) -> Tensor:
        captions = [*chain(*captions_by_row)]
        of_rank = captions[self.ranks.rank :: self.ranks.world_size]

        def embed() -> Tensor:
            return embed_text(
                model, of_rank, self._tokenizer, self.context_length, self.micro_batch
            )

        return self._gather_features(len(captions), embed)

    def _gather_features(self, total: int, embed: Callable[[], Tensor]) -> Tensor:
        """Gather (total, D) features of items interleaved over ranks. A rank's ValueError raises
        CollectiveUserError on all."""
        with raise_on_all_ranks():
            features_nD = embed()
        # Ranks may have one row more or less, but gather equal shapes: R ranks, n rows, D features.
        num_rows = -(-total // self.ranks.world_size)
        rows_nD = features_nD.new_zeros(num_rows, features_nD.shape[1])
        rows_nD[: len(features_nD)] = features_nD
        by_rank_RnD = rows_nD.repeat(self.ranks.world_size, 1, 1)
        # `by_rank_RnD` holds views, which receive the ranks' rows.
        if self.ranks.world_size > 1:
            dist.all_gather([*by_rank_RnD], rows_nD)
        # Item i is row i // R of rank i % R.
        return by_rank_RnD.transpose(0, 1).flatten(0, 1)[:total]

    def _note(self, items: Iterable[SkippedSample]) -> None:
        """Keep unusable items, and print the new ones."""
        new = [broken for broken in dict.fromkeys(items) if broken not in self._broken]
        self._broken |= dict.fromkeys(new)
        if self.ranks.is_main_process:
            for broken in new[:MAX_NOTES]:
                print(f"{FIELD}: skipped {printable(str(broken))}", file=sys.stderr, flush=True)
