"""Which checkpoints a run deletes: those that newer and better ones make superfluous, and older ones where the disk is full.

Only its own, and none that isn't whole: what another run has written, or what can't be read, is for a person to delete.
"""

from collections.abc import Callable
from pathlib import Path

from clap_ds.config.sections import CheckpointSettings
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import Manifest, warn


class Rotation:
    """Of one folder, on rank 0.

    Args:
        rule: `clap.checkpoint`.
        is_in_use: whether a checkpoint is being read at this moment.

    Attributes:
        run: id of the run whose checkpoints may go.
        damaged: names of checkpoints that couldn't be read.
    """

    def __init__(self, folder: Path, rule: CheckpointSettings, is_in_use: Callable[[Path], bool]) -> None:
        self._folder, self._rule, self._is_in_use = folder, rule, is_in_use
        self.run = ""
        self.damaged: dict[str, str] = {}

    def delete_superfluous(self) -> None:
        """Delete what the newest checkpoint makes superfluous."""
        try:
            for name in files.superfluous(self._own(), self._rule):
                if not self._is_in_use(self._folder / name):
                    files.remove(self._folder / name)
        except OSError as error:
            warn(f"an old checkpoint can't be deleted: {error}")

    def make_room(self) -> bool:
        """Give up the oldest checkpoint that is none of the best, as long as another is left; False where there is none."""
        own = self._own()
        kept = files.best(own, self._rule.best_by)[: self._rule.keep_best]
        for name in reversed(own):
            if len(own) > 1 and name not in kept and not self._is_in_use(self._folder / name):
                warn(f"the disk is full: {name} is given up for a newer checkpoint")
                files.remove(self._folder / name)
                return True
        return False

    def bytes_there(self) -> int:
        """Size of the checkpoints that may go."""
        return sum(record.bytes for manifest in self._own().values() for record in manifest.files.values())

    def _own(self) -> dict[str, Manifest]:
        """The run's whole checkpoints, the newest first, by name."""
        return {
            name: manifest
            for name, manifest in files.read_all(self._folder).items()
            if manifest.run == self.run and name not in self.damaged and files.seems_whole(self._folder / name)
        }
