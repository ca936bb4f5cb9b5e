"""A rank's state on its way into checkpoints and back."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mpipipe import checkpoint
from mpipipe.collectives import all_gather_objects, barrier
from mpipipe.config import Config
from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.formats.checkpoint import BFLOAT16, BUFFERS, FIRST_MOMENTS, PARAMETERS, SECOND_MOMENTS
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import EventKind
from mpipipe.optim import AdamW
from mpipipe.trace import Recorder
from mpipipe.trainer.build import RankModel
from mpipipe.trainer.folder import long_waits
from mpipipe.transport import Transport

_log = logging.getLogger(__name__)
_SECONDS_PER_MINUTE = 60.0


class Saver:
    """Saves and restores everything that a resume needs. Every method but ``due`` without minutes is collective.

    ``facts``: texts that a checkpoint keeps beside the state, alike on all ranks; a resume that finds others warns.
    ``recorder``: takes the time of a save; the trainer changes it with the steps that are traced.
    """

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        transport: Transport,
        model: RankModel,
        optimizer: AdamW,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._paths = paths
        self._transport = transport
        self._model = model
        self._optimizer = optimizer
        self.recorder = recorder
        self._last_save = time.monotonic()
        self.facts: dict[str, str] = {}
        self.updates_done = 0
        self.restored = False
        self.last_save_s = 0.0

    def due(self, step: int) -> bool:
        """Whether the schedule of saves has one after ``step``. Minutes are counted by rank 0's clock."""
        section = self._config.checkpoint
        if section.every_steps and step % section.every_steps == 0:
            return True
        if not section.every_minutes:
            return False
        late = time.monotonic() - self._last_save >= section.every_minutes * _SECONDS_PER_MINUTE
        return bool(all_gather_objects(self._transport, late)[0])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that this rank needs, by its path in a checkpoint."""
        found: dict[str, torch.Tensor] = {path: _as_kept(tensor) for path, tensor in self._model.fixed.items()}
        for name, parameter in self._model.parameters.items():
            first, second = self._optimizer.moments(name)
            found[PARAMETERS + name] = parameter.detach()
            found[FIRST_MOMENTS + name] = first
            found[SECOND_MOMENTS + name] = second
        return found

    def _state(self, samples_seen: int) -> checkpoint.CheckpointState:
        rank = self._transport.rank
        elsewhere = {info.name for info in self._model.everything if info.owner != rank}
        elsewhere |= {group.names[0] for group in self._model.tied if group.ranks[0] != rank}
        tensors = {
            path: tensor.cpu().numpy() for path, tensor in self._tensors().items() if _name_of(path) not in elsewhere
        }
        aliases = {
            PARAMETERS + group.names[0]: tuple(PARAMETERS + name for name in group.names[1:])
            for group in self._model.tied
            if PARAMETERS + group.names[0] in tensors
        }
        scalars: dict[str, int | float | str] = {
            "samples_seen": samples_seen,
            "updates": self._optimizer.steps_done,
            "seed": self._config.run.seed,
            **self.facts,
        }
        bfloat16 = frozenset(path for path in tensors if self._is_bfloat16(path))
        return checkpoint.CheckpointState(tensors, scalars, aliases, self._config.to_toml(), bfloat16)

    def _is_bfloat16(self, path: str) -> bool:
        fixed = self._model.fixed.get(path)
        return fixed is not None and fixed.dtype == torch.bfloat16

    def _kept_type(self, path: str, kept: torch.Tensor) -> str:
        """The name in a checkpoint of the type of a tensor that :meth:`_tensors` gives."""
        return BFLOAT16 if self._is_bfloat16(path) else str(kept.dtype).removeprefix("torch.")

    def save(self, step: int, samples_seen: int) -> Path:
        """Write ``checkpoints/step-...`` and thin out older ones as ``checkpoint.keep_last`` and ``keep_every`` say."""
        t0 = time.perf_counter_ns()
        with long_waits(self._transport, self._config):
            folder = checkpoint.save(self._transport, self._paths.checkpoints, step, self._state(samples_seen))
            self._prune(step)
        self._last_save = time.monotonic()
        self.last_save_s = (time.perf_counter_ns() - t0) / 1e9
        self.recorder.record(int(EventKind.CHECKPOINT), t0, time.perf_counter_ns())
        return folder

    def _prune(self, step: int) -> None:
        section = self._config.checkpoint
        if not section.keep_last:
            return
        if self._transport.rank == 0:
            try:
                checkpoint.prune(
                    self._paths.checkpoints, section.keep_last, section.keep_every, read_newest=False, newest_step=step
                )
            except OSError as error:
                _log.warning("older checkpoints could not be removed, the run goes on: %s", error)
        barrier(self._transport)

    def restore(self, folder: str | Path | None) -> tuple[int, int] | None:
        """Load into the live tensors; (step, samples seen), or None where the run folder has no checkpoint.

        Raises ``CheckpointError`` on every rank when there are checkpoints and none is whole: starting anew would hide
        that.
        """
        tensors = self._tensors()
        kinds = {path: (tuple(tensor.shape), self._kept_type(path, tensor)) for path, tensor in tensors.items()}
        with long_waits(self._transport, self._config):
            loaded, passed_over = checkpoint.restore(self._transport, self._paths.checkpoints, kinds, folder=folder)
        if self._transport.rank == 0:
            for reason in passed_over:
                _log.warning("passed over: %s", reason)
        if loaded is None:
            self._refuse_damaged(passed_over)
            return None
        seed = loaded.scalars.get("seed", self._config.run.seed)
        if seed != self._config.run.seed:
            raise ConfigError(
                f"the checkpoint {loaded.folder} was made with seed {seed}; with another one the data would come in "
                "another order",
                key="run.seed",
                value=self._config.run.seed,
                allowed=str(seed),
            )
        for name, value in self.facts.items():
            before = loaded.scalars.get(name, value)
            if before != value and self._transport.rank == 0:
                if name == "data.train":
                    before, value = self._files_in_words(loaded.config_text)
                _log.warning("%s was %s when %s was saved, and is %s now", name, before, loaded.folder.name, value)
        for path, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(_writable(loaded.tensors[path])))
        self.updates_done = int(loaded.scalars["updates"])
        self.restored = True
        return loaded.step, int(loaded.scalars["samples_seen"])

    def _files_in_words(self, config_text: str) -> tuple[str, str]:
        """The token files of a checkpoint and of this run, for a message about fingerprints that differ."""
        before, now = Config.from_toml(config_text).data.train, self._config.data.train
        word = "other tokens in " if before == now else ""
        return f"{', '.join(before)}", f"{word}{', '.join(now)}"

    def _refuse_damaged(self, passed_over: list[str]) -> None:
        whole_names = all_gather_objects(self._transport, list(self._paths.checkpoint_steps()))[0]
        if whole_names:
            error = CheckpointError(
                f"{self._paths.checkpoints}: no checkpoint is whole ({'; '.join(passed_over)}). To begin anew, set "
                "run.dir to another folder"
            )
            error.seen_alike = True
            raise error


def _as_kept(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that a checkpoint holds: truth values as bytes, bfloat16 as bits, complex numbers as
    pairs in a last dimension.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    plain = {torch.bool: torch.uint8, torch.bfloat16: torch.uint16}.get(tensor.dtype)
    return tensor if plain is None else tensor.view(plain)


def _name_of(path: str) -> str:
    """The parameter's name in a path as ``/optimizer/exp_avg/NAME``."""
    for prefix in (PARAMETERS, BUFFERS, FIRST_MOMENTS, SECOND_MOMENTS):
        if path.startswith(prefix):
            return path[len(prefix) :]
    return path


def _writable(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return array if array.flags.writeable else array.copy()
