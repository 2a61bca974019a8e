"""Find the checkpoints of a run and resume from the newest, or start from pretrained weights.

The folder of a run's checkpoints is named by a hash of its settings. It is also found if the run's
data or initial weights have moved.
"""

import glob
import uuid
import zlib
from pathlib import Path
from typing import Any

from clap_ds.checkpoint.checkpoint_files import read_all
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.remote import find_weights, try_target
from clap_ds.checkpoint.restore import compare_settings, tokenizer_problem
from clap_ds.checkpoint.train_state import ResumeOptions, TrainState
from clap_ds.config.arguments import find_field
from clap_ds.config.schema import ShardData, choose_best_metric
from clap_ds.config.settings import RunSettings
from clap_ds.data.shard_assignment import expand_sources
from clap_ds.data.shard_manifest import describe_contents
from clap_ds.distributed.collectives import raise_on_all_ranks, rank, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.utils.errors import count_of
from clap_ds.utils.redaction import redact_all, redact_urls

# What a run has in common with its checkpoints.
_IDENTITY = (
    "clap.contents",
    "clap.loss",
    "clap.model.preset",
    "clap.model.pretrained_text",
    "clap.seed",
    "clap.train.freeze",
)


def setup_checkpointer(run: RunSettings, ranks: Ranks, logs: Path) -> Checkpointer:
    """Build the checkpointer of a run, in the folder that it already has, if any. A collective;
    raises CollectiveUserError. `logs`: the run directory."""
    clap = run.clap
    with raise_on_all_ranks():
        config, folder = run_on_rank0(lambda: prepare_checkpoints(run))
    metric = choose_best_metric(clap.checkpoint, clap.evaluation)
    return Checkpointer(
        folder,
        clap.checkpoint.model_copy(update={"best_metric": metric}),
        tokenizer=getattr(clap.data, "tokenizer", None),
        config=config,
        # The folder of all attempts.
        job=ranks.job_folder.parent if ranks.job_folder is not None else None,
        logs=logs,
    )


def prepare_checkpoints(run: RunSettings) -> tuple[dict[str, Any], Path]:
    """Return a run's JSON and folder for its checkpoints. Raises ValueError for missing data, or
    for a `remote_sync` that can't be written."""
    config = describe_run(run)
    folder = find_checkpoint_folder(run, config)
    url = run.clap.checkpoint.remote_sync
    # The first copy may be hours later.
    if url is not None:
        try_target(url)
    return config, folder


def describe_run(run: RunSettings) -> dict[str, Any]:
    """Return a run's JSON for its checkpoints, with the contents of its data and initial weights by
    field as `clap.contents`.

    They are the same wherever the files are. Weights on the Hub and a folder of checkpoints only
    have a name. Raises ValueError for missing shards, and for a missing file of weights with them.
    """
    clap = run.clap
    contents: dict[str, str] = {}
    missing_weights = ""
    if clap.train.pretrained is not None:
        try:
            path = find_weights(clap.train.pretrained)
        except ValueError as error:
            raise ValueError(f"clap.train.pretrained: {error}") from None
        files = [path] if path.is_file() else path.glob("*.safetensors")
        contents["train.pretrained"] = f"{path.name}: {describe_contents([*map(str, files)])}"
        # Without a suffix it may be a name on the Hub.
        if path.suffix and not path.exists():
            missing_weights = f"\nclap.train.pretrained: {path}: no such file"
    if isinstance(clap.data, ShardData):
        try:
            sources = expand_sources(clap.data.shards)
        except ValueError as error:
            raise ValueError(f"{error}{missing_weights}") from None
        shards = []
        for source in sources:
            shards += source.shards
        contents["data.shards"] = describe_contents(shards)
    config = run.resolved()
    config["clap"]["contents"] = contents
    return config


def find_checkpoint_folder(run: RunSettings, config: dict[str, Any]) -> Path:
    """Return the folder with a run's checkpoints, also if its data or initial weights have moved,
    or else a new one.

    For a new one, print other runs of the same name, how they differ and how to resume them.
    `config`: the run's `describe_run`.
    """
    folder = run.checkpoint_folder
    if run.clap.checkpoint.folder is not None:
        return folder
    # Checkpoints hold no secrets, so neither may the settings that are compared with theirs.
    config = redact_all(config)
    # `[0-9a-f]`: the hash. A longer name of another run ends in one, too.
    pattern = f"{glob.escape(run.run_name)}-{'[0-9a-f]' * 8}-checkpoints"
    other_runs: dict[Path, str] = {}
    for path in sorted(folder.parent.glob(pattern)):
        damaged: dict[str, str] = {}
        manifests = [*read_all(path, damaged).values()]
        if manifests:
            newest = manifests[0]
            if _is_same_run(newest.settings, config, is_same_folder=path == folder):
                return path
            changes = "; ".join(compare_settings(newest.settings, config))
            other_runs[path] = f"step {newest.step}; {changes}"
        elif damaged and path != folder:
            other_runs[path] = f"none of its {len(damaged)} checkpoints can be read"
    if folder in other_runs:
        # It has the same paths, but their contents have changed.
        checksum = zlib.crc32(repr(config["clap"]["contents"]).encode())
        folder = folder.with_name(f"{run.run_name}-{checksum:08x}-checkpoints")
    if other_runs:
        print(f"{folder} is new. Other runs named {run.run_name} resume with:")
    for path, description in other_runs.items():
        print(f"  --set clap.checkpoint.folder={path} ({description})", flush=True)
    return folder


def _is_same_run(saved: dict[str, Any], current: dict[str, Any], *, is_same_folder: bool) -> bool:
    # Earlier versions recorded no contents.
    if is_same_folder and find_field(saved, "clap.contents") is None:
        return True
    return all(find_field(saved, name) == find_field(current, name) for name in _IDENTITY)


@raise_on_all_ranks()
def load_pretrained(
    path: str | None,
    model: ContrastiveModel,
    tokenizer: str | None,
    options: ResumeOptions = ResumeOptions(),
) -> None:
    """Load `clap.train.pretrained`, if set. A collective; raises CollectiveUserError if missing, or
    for another model or tokenizer."""
    if path is None:
        return
    try:
        weights = load_weights(path, model.config)
        weights.load_into(model)
        problem = tokenizer_problem(
            weights.tokenizer, tokenizer, model.config.text, is_trusted=weights.trusts_tokenizer
        )
        if problem and not options.resume_weights_only:
            raise ValueError(f"{problem}. Set clap.data.tokenizer to {weights.tokenizer}")
    except ValueError as error:
        raise ValueError(f"clap.train.pretrained: {error}") from None
    if rank() == 0:
        print(f"initial weights: {weights.description}", flush=True)


@raise_on_all_ranks()
def resume(
    checkpointer: Checkpointer,
    engine: ClapEngine,
    source: str,
    options: ResumeOptions,
    ranks: Ranks,
    record: RunDirectory,
) -> TrainState:
    """Resume from the newest checkpoint, or the one that `source` (`clap.train.resume`) names. A
    collective; raises CollectiveUserError.

    Attempts of a job and reruns repeat the same command. Its --restart or path in
    `clap.train.resume` takes effect only once, as far as the run ids in checkpoints show.
    """
    attempt = ranks.job_folder
    if source != "auto" and not options.restart:
        run_id = f"from {redact_urls(source)}"
    elif attempt is not None:
        # All attempts of a job are one run.
        run_id = str(attempt.parent)
    else:
        # A run outside SLURM is new at each start, unless loading sets the checkpoint's id. Only
        # rank 0, which writes, uses it.
        run_id = uuid.uuid4().hex
    checkpointer.run_id = run_id
    try:
        path = checkpointer.find(None if source == "auto" else source, restart=options.restart)
        if path is None:
            return TrainState()
        state = checkpointer.load(path, engine, resume_weights_only=options.resume_weights_only)
    except ValueError as error:
        raise ValueError(f"clap.train.resume: {error}") from None
    if source != "auto":
        # Loading has set the id of the run at the path, whose checkpoints stay.
        checkpointer.run_id = run_id
    if ranks.is_main_process:
        record.update_summary(resumed_from=str(path), resumed_at_step=state.step)
        message = f"resuming from {path}: step {state.step}, {state.samples:,} samples"
        num_ranks = len(state.data)
        if num_ranks != ranks.world_size:
            message += f", on {count_of(ranks.world_size, 'rank')} instead of {num_ranks}"
        print(message, flush=True)
    return state
