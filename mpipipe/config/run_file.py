"""Config: a whole run file, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpipipe.config import toml_text
from mpipipe.config.checks import problems
from mpipipe.config.explain import FileOf, explain, joined
from mpipipe.config.keys import close, nearest_key, section_fields
from mpipipe.config.sections import (
    BatchSection,
    CheckpointSection,
    CommSection,
    DataSection,
    EvalSection,
    LogSection,
    LrSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunSection,
    TraceSection,
    is_name,
)
from mpipipe.errors import ConfigError, TopologyError
from mpipipe.units import counted


class Config(BaseModel):
    """A checked run file: one frozen section a table of the file, with the defaults filled in.

    Make one with ``Config.load`` or ``Config.from_tables``: both raise ConfigError, in the keys of the file. Two
    configs are equal if all their values are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: RunSection = Field(description="where the run is kept and how long it is")
    model: ModelSection | None = Field(
        None, description="the transformer's shape; left out by a script that brings its own layers"
    )
    data: DataSection = Field(description="token files")
    batch: BatchSection = Field(description="sequences of a step and of a microbatch")
    pipeline: PipelineSection = Field(description="ranks, chunks, schedule and partition")
    optimizer: OptimizerSection = Field(description="the update")
    lr: LrSection = Field(description="the learning rate over the steps")
    precision: PrecisionSection = Field(description="number types")
    checkpoint: CheckpointSection = Field(description="when the state is saved")
    eval: EvalSection = Field(description="evaluation during training")
    trace: TraceSection = Field(description="what happened when")
    comm: CommSection = Field(description="messages between ranks")
    log: LogSection = Field(description="progress")

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Read and check a run file, with settings ``"section.key=value"`` in place of the file's.

        Without ``run.name`` the run has the file's name; without ``run.dir`` its folder is ``runs/NAME``, below the
        current folder. Raises ConfigError (also its subclass PartitionError): the message has one line for each
        problem, the attributes are those of the first. Errors about a setting name ``--set`` as the file.
        """
        path = Path(path)
        tables = toml_text.read(path)
        given = set()
        for (section, key), value in toml_text.parse_overrides(overrides).items():
            if not section:
                raise _without_section(key, value, cls)
            table = tables.setdefault(section, {})
            if isinstance(table, dict):
                table[key] = value
            given.add(f"{section}.{key}")
            given.add(section if section not in cls.model_fields else "")
        run = tables.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", path.stem)
            if is_name(run["name"]):
                run.setdefault("dir", f"runs/{run['name']}")
        return cls._checked(tables, lambda key: toml_text.OVERRIDE if key in given else str(path))

    @classmethod
    def from_tables(cls, tables: dict[str, object]) -> Config:
        """Check the tables of a run file given as dictionaries. Raises ConfigError as ``load`` does, without a file."""
        return cls._checked(tables, lambda key: None)

    @classmethod
    def from_toml(cls, text: str, file: str = "config") -> Config:
        """Check the text of a run file, as ``to_toml`` writes it; ``file`` is the name that errors give it."""
        return cls._checked(toml_text.parse(text, file), lambda key: file)

    @classmethod
    def _checked(cls, tables: dict[str, object], file_of: FileOf) -> Config:
        complete = {**{name: {} for name in cls.model_fields if name != "model"}, **tables}
        try:
            config = cls.model_validate(complete)
        except ValidationError as failure:
            error = explain(failure, cls, complete, file_of)
        else:
            found = [_with_file(problem, file_of) for problem in problems(config)]
            if not found:
                return config
            error = joined(found)
        raise error

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one optimizer step (m)."""
        return self.batch.num_microbatches

    @property
    def run_dir(self) -> Path:
        """The run folder; a relative one lies below the current folder."""
        return Path(self.run.dir)

    def resolve(
        self,
        num_ranks: int,
        file: str | Path | None = None,
        settings: Iterable[str] = (),
        command: str = "python YOUR_SCRIPT",
    ) -> Config:
        """This config for ``num_ranks`` started ranks, with ``pipeline.ranks`` filled in.

        Raises TopologyError if the run file asks for another number of ranks, PartitionError if the model can't be cut
        for that many. For the message: ``file`` is the run file's name, and ``settings`` are the ``--set`` texts, whose
        keys it says to come from there; ``command`` is what was started on every rank.
        """
        given = {".".join(place) for place in toml_text.parse_overrides(settings)}

        def file_of(key: str) -> str | None:
            return toml_text.OVERRIDE if key in given else None if file is None else str(file)

        asked = self.pipeline.ranks
        if asked is not None and asked != num_ranks:
            problem = (
                f"the run file asks for {counted(asked, 'rank')}, the launch has {num_ranks} (MPI world size "
                f"{num_ranks}): start 'mpirun -n {asked} {command}', or remove pipeline.ranks to use all"
            )
            if "pipeline.ranks" in given:
                problem = problem.replace("the run file asks", "this setting asks")
            raise TopologyError(problem, file=file_of("pipeline.ranks"), key="pipeline.ranks", value=asked)
        tables = self._tables()
        tables["pipeline"]["ranks"] = num_ranks
        return type(self)._checked(dict(tables), file_of)

    def needed_model(self, file: str | Path | None = None) -> ModelSection:
        """The [model] section. Raises ConfigError where the run file has none."""
        if self.model is None:
            raise ConfigError(
                "this section is required here: layers, hidden, heads and sequence at least. A run whose layers "
                "come from a script has none, and this verb can't know them",
                file=file,
                key="model",
            )
        return self.model

    def require(self, *keys: str, file: str | Path | None = None) -> None:
        """Raise ConfigError if one of these keys, that only some verbs need (``"data.train"``), has no value."""
        missing = []
        for key in keys:
            section, name = key.split(".")
            if getattr(getattr(self, section), name) in (None, ()):
                description = type(getattr(self, section)).model_fields[name].description
                missing.append(ConfigError(f"this key is required here: {description}", file=file, key=key))
        if missing:
            raise joined(missing)

    def to_toml(self) -> str:
        """The resolved run file as TOML text; loading it gives an equal config."""
        return toml_text.write(self._tables())

    def _tables(self) -> dict[str, dict[str, object]]:
        return {
            name: {key: value for key, value in getattr(self, name) if value is not None}
            for name in type(self).model_fields
            if getattr(self, name) is not None
        }


def _without_section(key: str, value: object, root: type[BaseModel]) -> ConfigError:
    return ConfigError(
        f"'{key}=...' names no section",
        file=toml_text.OVERRIDE,
        key=key,
        value=value,
        allowed="section.key=value",
        nearest=nearest_key("", key, section_fields(root)),
    )


def _with_file(error: ConfigError, file_of: FileOf) -> ConfigError:
    return type(error)(
        error.problem,
        file=file_of(error.key or ""),
        key=error.key,
        value=error.value,
        allowed=error.allowed,
        nearest=error.nearest,
    )


def unknown_schedule(name: str, known: Sequence[str], file: str | Path | None = None) -> ConfigError:
    """The error for a ``pipeline.schedule`` that is none of the ``known`` names (a room above this one has them)."""
    nearest = close(name.lower(), known, cutoff=0.4)
    return ConfigError(
        f'"{name}" is no schedule', file=file, key="pipeline.schedule", value=name, allowed=known, nearest=nearest
    )
