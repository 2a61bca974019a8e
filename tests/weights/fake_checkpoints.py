"""Checkpoints with made-up content, for tests of what happens to their files."""

from pathlib import Path

from clap_ds.weights import checkpoint_files
from clap_ds.weights.manifest import Manifest

CONTENTS = {"deepspeed/mp_rank_00_model_states.pt": b"states" * 3000, "weights.safetensors": b"weights" * 1000}


def make_checkpoint(
    folder: Path,
    step: int,
    *,
    metrics: dict[str, float] | None = None,
    tokenizer: str | None = None,
    contents: dict[str, bytes] = CONTENTS,
) -> Path:
    """As `CheckpointFolder.save` makes one, without an engine; every step's content is its own."""
    draft = checkpoint_files.partial_of(folder, checkpoint_files.checkpoint_name(step, folder))
    files = {}
    for name, content in contents.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        files[name] = checkpoint_files.write_file(
            draft / name, content + (b"%d" % step if contents is CONTENTS else b"")
        )
    others, _ = checkpoint_files.read_all(folder)
    return checkpoint_files.publish(
        draft,
        Manifest(
            serial=checkpoint_files.next_serial(others.values()),
            step=step,
            model={},
            engine={},
            tokenizer=tokenizer,
            metrics=metrics or {},
            files=files,
        ),
    )


def flip_bit(path: Path, position: int) -> None:
    """Change one bit of a file, its size kept."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
