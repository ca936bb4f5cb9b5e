"""The sections of a run file, one frozen model each.

Every field has the type it has in the file: a number in quotes is refused, an integer is fine where a float is wanted,
``true`` is no number. A field takes the values of this version only; those of later versions are named in ``later.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from mpipipe.errors import ConfigError
from mpipipe.units import parse_duration

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 2000  # cutting by cost takes a time that grows with the square of the layers
MAX_MICROBATCHES = 100_000  # a schedule's table has a row for each
MAX_NAME_BYTES = 255  # of Linux file systems
MAX_PATH_BYTES = 3000  # Linux takes 4095; room for the names below a run folder
WRONG = "mpipipe_wrong"  # error type of our own validators; its context holds "problem" and "allowed"


def _wrong(problem: str, allowed: str) -> PydanticCustomError:
    return PydanticCustomError(WRONG, "{problem}", {"problem": problem, "allowed": allowed})


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("is no text", "text in quotes")
    if not value.strip():
        raise _wrong("is empty", "text that is not empty")
    if any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 or 0xD800 <= ord(letter) < 0xE000 for letter in value):
        raise _wrong("holds a control character or a character that can't be written as UTF-8", "printable text")
    return value


def _check_path(value: object) -> str:
    text = _check_text(value)
    if any(len(part.encode()) > MAX_NAME_BYTES for part in text.split("/")) or len(text.encode()) > MAX_PATH_BYTES:
        raise _wrong(
            "is too long for a path", f"at most {MAX_NAME_BYTES} bytes a folder, {MAX_PATH_BYTES} in the whole path"
        )
    if text.split("/")[0].startswith("~"):
        raise _wrong("names a home folder, which only a shell looks up", "a whole path, as $HOME/runs in a shell")
    return text


def _check_name(value: object) -> str:
    text = _check_text(value)
    if "/" in text or text.strip() in (".", "..") or len(text.encode()) > MAX_NAME_BYTES:
        raise _wrong(
            "is no name of one folder",
            f"text without '/', other than '.' and '..', of at most {MAX_NAME_BYTES} bytes; run.dir names a folder "
            "elsewhere",
        )
    return text


def is_path(value: object) -> bool:
    """Whether ``run.dir``, ``run.resume`` or an entry of ``data.train`` may be this value."""
    try:
        _check_path(value)
    except PydanticCustomError:
        return False
    return True


def is_name(value: object) -> bool:
    """Whether ``run.name`` may be this value."""
    try:
        _check_name(value)
    except PydanticCustomError:
        return False
    return True


def _check_paths(value: object) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        raise _wrong("is no list of texts", 'a list of paths or globs, as ["a.h5", "more/*.h5"]')
    return tuple(_check_path(entry) for entry in entries)


def _check_duration(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise _wrong("has no unit", f'text with units, as "{value}s"')
    text = _check_text(value)
    try:
        parse_duration(text)
    except ConfigError as error:
        raise _wrong("is no duration", str(error.allowed)) from None
    return text


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_partition(value: object) -> str | tuple[int, ...]:
    allowed = '"cost", "even", or a list with the number of layers of each stage, every one at least 1'
    if isinstance(value, str):
        if value not in ("cost", "even"):
            raise _wrong("is not known", allowed)
        return value
    if not isinstance(value, list | tuple) or not all(_is_whole(n) and 1 <= n <= MAX_COUNT for n in value) or not value:
        raise _wrong("is no split", allowed)
    return tuple(value)


def _check_betas(value: object) -> tuple[float, float]:
    allowed = "a list of two numbers, each at least 0 and below 1"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _wrong("is no pair of numbers", allowed)
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1:
            raise _wrong("is no pair of numbers in the right range", allowed)
    return (float(value[0]), float(value[1]))


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
NumberAboveZero = Annotated[float, Field(gt=0)]
NumberFromZero = Annotated[float, Field(ge=0)]
Text = Annotated[str, PlainValidator(_check_text)]
PathText = Annotated[str, PlainValidator(_check_path)]
Name = Annotated[str, PlainValidator(_check_name)]
Paths = Annotated[tuple[str, ...], PlainValidator(_check_paths)]
Duration = Annotated[str | None, PlainValidator(_check_duration)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no conversions, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class RunSection(Section):
    """``[run]``: where the run is kept and how long it is."""

    dir: PathText = Field("runs/run", description="run folder, relative to the current folder (default: runs/NAME)")
    name: Name = Field("run", description="name of the run (default: the run file's name without its ending)")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of every random number")
    steps: Count = Field(1000, description="optimizer steps of the whole run, counted from its first start")
    resume: PathText = Field("auto", description='"auto" (newest complete checkpoint, if any), "never", or a path')
    time_limit: Duration = Field(None, description='save and stop (exit code 75) before this is over, as "3h50m"')

    @property
    def time_limit_s(self) -> float | None:
        """``time_limit`` in seconds, or None without a limit."""
        return None if self.time_limit is None else parse_duration(self.time_limit)


class ModelSection(Section):
    """``[model]``: the transformer's shape."""

    family: Literal["gpt2"] = Field("gpt2", description="architecture of the layers")
    layers: int = Field(ge=1, le=MAX_LAYERS, description="number of transformer blocks")
    hidden: Count = Field(description="width of the hidden state")
    heads: Count = Field(description="attention heads; divides hidden")
    ffn_hidden: Count = Field(4, description="width inside the feed-forward part (default: 4 times hidden)")
    vocab: Count = Field(256, description="number of token ids")
    sequence: Count = Field(description="tokens in a sequence")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropping an activation")
    tie_embeddings: bool = Field(True, description="one weight for the token embedding and the head")
    norm_eps: NumberAboveZero = Field(1e-5, description="added to the variance in layer norms")

    @model_validator(mode="before")
    @classmethod
    def _fill_ffn_hidden(cls, values: object) -> object:
        if isinstance(values, dict) and "ffn_hidden" not in values:
            hidden = values.get("hidden")
            if _is_whole(hidden) and 1 <= hidden <= MAX_COUNT // 4:
                return {**values, "ffn_hidden": 4 * hidden}
        return values


class DataSection(Section):
    """``[data]``: token files."""

    train: Paths = Field((), description="token files to train on: paths or globs")
    validation: Paths = Field((), description="token files for evaluation: paths or globs")
    format: Literal["auto", "h5"] = Field("auto", description="format of the token files")
    shuffle: bool = Field(True, description="visit the windows in a random order, drawn anew for each epoch")


class BatchSection(Section):
    """``[batch]``: how many sequences make an optimizer step, and how they are cut."""

    sequences: Count = Field(8, description="sequences in one optimizer step")
    microbatch: Count = Field(1, description="sequences in one microbatch; the last one of a step may be smaller")

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one optimizer step (m): ceil(sequences / microbatch)."""
        return -(-self.sequences // self.microbatch)


class PipelineSection(Section):
    """``[pipeline]``: how the model is cut over ranks, and in which order the pieces compute."""

    ranks: Count | None = Field(None, description="pipeline ranks (default: all ranks that were started)")
    replicas: Count = Field(1, description="data-parallel copies of the pipeline")
    chunks: Count = Field(1, description="pieces of the model on each rank")
    schedule: Text = Field("1f1b", description="a name that 'mpipipe schedule list' prints, a table's file, or auto")
    partition: Annotated[str | tuple[int, ...], PlainValidator(_check_partition)] = Field(
        "cost", description='"cost" (equal computing time), "even" (equal layer counts), or a list: layers per stage'
    )
    recompute: Literal["none"] = Field("none", description="activations that are computed again instead of kept")


class OptimizerSection(Section):
    """``[optimizer]``."""

    name: Literal["adamw"] = Field("adamw", description="optimizer")
    lr: NumberAboveZero = Field(3e-4, description="highest learning rate")
    betas: Annotated[tuple[float, float], PlainValidator(_check_betas)] = Field(
        (0.9, 0.95), description="decay of the first and second moment"
    )
    eps: NumberAboveZero = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NumberFromZero = Field(0.1, description="decoupled weight decay")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description='parameters that decay: "matrices" (two dimensions or more), or "all"'
    )
    clip_norm: NumberFromZero = Field(0.0, description="largest norm of the whole gradient; 0 or absent: no clipping")
    shard: bool = Field(False, description="split the optimizer's state over the replicas")


class LrSection(Section):
    """``[lr]``: the learning rate over the steps."""

    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="course after the warm-up")
    warmup_steps: CountOrZero = Field(0, description="steps in which the learning rate rises from 0 to optimizer.lr")
    min_lr: NumberFromZero = Field(0.0, description="learning rate at the last step of linear and cosine")


class PrecisionSection(Section):
    """``[precision]``."""

    compute: Literal["float32"] = Field("float32", description="type of activations and of the weights that compute")
    gradients: Literal["float32"] = Field("float32", description="type in which gradients are summed")


class CheckpointSection(Section):
    """``[checkpoint]``: when the state is saved and what is kept."""

    every_steps: CountOrZero = Field(0, description="save after every this many steps; 0: only at the end of the run")
    every_minutes: NumberFromZero = Field(0.0, description="save when this many minutes have passed; 0: never")
    keep_last: CountOrZero = Field(0, description="newest checkpoints to keep; 0: all")
    keep_every: CountOrZero = Field(0, description="keep all whose step is a multiple of this; 0: none more")
    background: bool = Field(False, description="write checkpoints beside the training")
    on_disk_trouble: Literal["end"] = Field("end", description="what to do when a checkpoint can't be written")


class EvalSection(Section):
    """``[eval]``: loss over the validation tokens during training."""

    every_steps: CountOrZero = Field(
        0, description="evaluate after every this many steps too; always before the first and after the last"
    )
    batches: CountOrZero = Field(0, description="batches in one evaluation; 0: all validation tokens")


class TraceSection(Section):
    """``[trace]``: what happened when, one file a rank."""

    enabled: bool = Field(True, description="write trace files")
    first_step: CountOrZero = Field(0, description="first step to record")
    last_step: Count | None = Field(None, description="last step to record (default: the run's last)")


class CommSection(Section):
    """``[comm]``: messages between ranks."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description='where the stages compute: "cpu", "cuda" (an NVIDIA GPU a rank), "auto" (that, if there is one)',
    )
    path: Literal["auto", "staged", "cuda-aware"] = Field(
        "auto",
        description='how messages leave a GPU: "staged" (by way of host memory), "cuda-aware" (MPI takes GPU memory), '
        '"auto" (that, if a test proves it)',
    )
    wait: Literal["auto", "spin", "yield", "nap"] = Field(
        "auto",
        description='how to wait for a message: "spin" (without pause), "yield" (lets others run between two looks), '
        '"nap" (sleeps between them), "auto"',
    )
    timeout_s: NumberAboveZero = Field(600.0, description="seconds after which a wait for a message is an error")
    receive_ahead_bytes: Bytes = Field(
        64 << 20, description="memory of a rank for messages that come before it needs them; 0: one at a time"
    )


class LogSection(Section):
    """``[log]``."""

    every_steps: Count = Field(10, description="steps between two progress lines where there is no terminal")
    tensorboard: bool = Field(False, description="write TensorBoard files")
