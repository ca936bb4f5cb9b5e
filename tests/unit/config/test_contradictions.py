"""Keys of a run file that each are fine alone and do not go together: both are named, with what to change."""

from __future__ import annotations

import pytest

from mpipipe.config import Config
from mpipipe.errors import ConfigError

MINIMAL = "[model]\nlayers = 8\nhidden = 32\nheads = 4\nsequence = 16\n"


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    assert caught.value.seen_alike
    return caught.value


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(MINIMAL)
    return path


CROSS = {
    ("model.heads=5",): "model.heads",
    ("batch.sequences=4", "batch.microbatch=5"): "batch.microbatch",
    ("run.steps=5", "lr.warmup_steps=6"): "lr.warmup_steps",
    ("lr.min_lr=1", "lr.schedule=linear"): "lr.min_lr",
    ("eval.every_steps=5",): "eval.every_steps",
    ("trace.first_step=9", "trace.last_step=8"): "trace.last_step",
    ("pipeline.partition=[4, 3]",): "pipeline.partition",
    ("pipeline.partition=[4, 4]", "pipeline.ranks=4"): "pipeline.partition",
    ("pipeline.partition=[4, 2, 2]", "pipeline.chunks=2"): "pipeline.partition",
    ("pipeline.ranks=9",): "pipeline.ranks",
    ("pipeline.chunks=9",): "pipeline.chunks",
    ("lr.min_lr=1e-5",): "lr.min_lr",
    ("checkpoint.keep_every=5",): "checkpoint.keep_every",
    ("trace.first_step=6", "run.steps=5"): "trace.first_step",
    ("batch.sequences=100001",): "batch.sequences",
    ("batch.sequences=200001", "batch.microbatch=2"): "batch.sequences",
    ("comm.path=cuda-aware", "comm.device=cpu"): "comm.path",
}
# The other key of each pair, with its value, and what to change, as the message has them.
CROSS_TEXTS = {
    ("model.heads=5",): "5 heads do not divide model.hidden = 32 (allowed: a divisor of 32)",
    ("batch.sequences=4", "batch.microbatch=5"): "5 sequences is larger than batch.sequences = 4 (allowed: at most 4)",
    ("run.steps=5", "lr.warmup_steps=6"): "6 steps is longer than the run (run.steps = 5) (allowed: at most 5)",
    ("lr.schedule=cosine", "lr.min_lr=1"): "1.0 is above the highest learning rate (optimizer.lr = 0.0003) "
    "(allowed: at "
    "most 0.0003)",
    ("lr.min_lr=1e-5",): '1e-05 is never reached with lr.schedule = "constant": set lr.schedule = "linear" or '
    '"cosine", or '
    "lr.min_lr = 0",
    ("eval.every_steps=5",): "every 5 steps needs validation tokens: set data.validation, or eval.every_steps = 0",
    ("trace.first_step=9", "trace.last_step=8"): "step 8 lies before trace.first_step = 9 (allowed: at least 9)",
    ("trace.first_step=6", "run.steps=5"): "step 6 lies behind the run's last one (run.steps = 5), so nothing would be "
    "recorded: set an earlier one, or trace.enabled = false (allowed: at most 5)",
    ("comm.path=cuda-aware", "comm.device=cpu"): 'with comm.device = "cpu" no message leaves a GPU: set '
    'comm.device = "cuda", or comm.path = "auto"',
    ("checkpoint.keep_every=5",): "5 says what is kept besides the newest ones, and checkpoint.keep_last = 0 "
    "keeps all: set "
    "checkpoint.keep_last to at least 1, or checkpoint.keep_every = 0",
    ("pipeline.partition=[4, 3]",): "[4, 3] adds up to 7, and model.layers is 8 (allowed: a list that adds up to 8, or "
    "model.layers = 7)",
    ("pipeline.partition=[4, 4]", "pipeline.ranks=4"): "[4, 4] is a list of 2, and pipeline.ranks = 4 times "
    "pipeline.chunks = 1 needs one of 4 (allowed: a list of 4 numbers)",
    ("pipeline.partition=[4, 2, 2]", "pipeline.chunks=2"): "[4, 2, 2] is a list of 3, no multiple of "
    "pipeline.chunks = 2 "
    "(allowed: a list of ranks times 2 numbers)",
    ("batch.sequences=100001",): "100001 sequences in microbatches of batch.microbatch = 1 are 100001 "
    "microbatches, more "
    "than 100000: lower batch.sequences, or raise batch.microbatch (allowed: at most 100000)",
}


@pytest.mark.parametrize(("overrides", "text"), CROSS_TEXTS.items())
def test_a_contradiction_names_both_keys_and_values(run_file, overrides, text):
    assert str(error_of(run_file, *overrides)).endswith(text)


@pytest.mark.parametrize(
    "overrides",
    [
        ("checkpoint.keep_every=5", "checkpoint.keep_last=1"),
        ("lr.min_lr=1e-5", "lr.schedule=linear"),
        ("trace.first_step=6", "run.steps=5", "trace.enabled=false"),
        ("trace.first_step=5", "run.steps=5", "trace.last_step=5"),
        ("batch.sequences=200000", "batch.microbatch=2"),
        ("lr.warmup_steps=5", "run.steps=5"),
    ],
)
def test_what_goes_together(run_file, overrides):
    Config.load(run_file, overrides)


@pytest.mark.parametrize(("overrides", "key"), CROSS.items())
def test_keys_that_do_not_go_together(run_file, overrides, key):
    error = error_of(run_file, *overrides)
    assert error.key == key
    assert error.file == "--set"
