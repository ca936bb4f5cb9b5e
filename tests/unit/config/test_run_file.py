"""Run files: defaults, every kind of mistake with its message, settings, resolve, the round trip through TOML."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from mpipipe.config import Config
from mpipipe.config.keys import section_fields
from mpipipe.config.later import LATER_KEYS, LATER_VALUES, ONLY_NOW
from mpipipe.config.sections import PipelineSection
from mpipipe.errors import ConfigError, PartitionError, TopologyError

MINIMAL = """
[model]
layers = 8
hidden = 32
heads = 4
sequence = 16
"""
EXAMPLE = Path(__file__).resolve().parents[3] / "jobs" / "configs" / "tiny.toml"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(MINIMAL)
    return path


def error_of(run_file, *overrides):
    with pytest.raises(ConfigError) as caught:
        Config.load(run_file, overrides)
    assert caught.value.seen_alike
    assert "pydantic" not in str(caught.value)
    return caught.value


def test_defaults(run_file):
    config = Config.load(run_file)
    assert config.run.name == "small"
    assert config.run_dir == Path("runs/small")
    assert config.model.vocab == 256
    assert config.model.ffn_hidden == 128
    assert config.data.train == ()
    assert (config.batch.sequences, config.batch.microbatch, config.num_microbatches) == (8, 1, 8)
    assert config.pipeline.ranks is None
    assert (config.pipeline.schedule, config.pipeline.partition, config.pipeline.chunks) == ("1f1b", "cost", 1)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.optimizer.clip_norm == 0.0
    assert config.checkpoint.background is False
    assert config.run.time_limit_s is None


def test_example_has_16_microbatches():
    config = Config.load(EXAMPLE)
    assert config.num_microbatches == 16
    assert config.pipeline.ranks == 4
    assert config.optimizer.eps == 1e-8
    assert config.comm.timeout_s == 120.0


@pytest.mark.parametrize(("sequences", "microbatch", "m"), [(8, 2, 4), (8, 3, 3), (1, 1, 1), (7, 7, 1)])
def test_num_microbatches_rounds_up(run_file, sequences, microbatch, m):
    config = Config.load(run_file, [f"batch.sequences={sequences}", f"batch.microbatch={microbatch}"])
    assert config.batch.num_microbatches == m


UNKNOWN = {
    "batch.microbatchs=1": "batch.microbatch",
    "optimizer.learning_rat=1e-4": "optimizer.lr",
    "model.lr=1": "optimizer.lr",
    "optimizer.warmup_steps=5": "lr.warmup_steps",
    "model.sequences=8": "batch.sequences",
    "model.layers.x=1": "model.layers",
    "optimiser.lr=1": "optimizer",
    "trace.enable=false": "trace.enabled",
    "comm.timeout=3": "comm.timeout_s",
    "batch.batch_size=8": "batch.sequences",
}


@pytest.mark.parametrize(("override", "nearest"), UNKNOWN.items())
def test_unknown_key_names_the_nearest(run_file, override, nearest):
    error = error_of(run_file, override)
    assert error.file == "--set"
    assert error.nearest == nearest
    assert f"'{nearest}'" in str(error)
    assert "unknown" in str(error)


def test_key_in_the_wrong_section_says_where_it_belongs(run_file):
    error = error_of(run_file, "pipeline.lr=3")
    assert error.key == "pipeline.lr"
    assert "'lr' belongs to [optimizer]" in str(error)


def test_key_before_any_section(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("seed = 3\n" + MINIMAL)
    error = error_of(path)
    assert (error.key, error.nearest, error.file) == ("seed", "run.seed", str(path))


def test_unknown_section_lists_the_sections(run_file):
    error = error_of(run_file, "zzz.lr=3")
    assert error.key == "zzz"
    assert list(error.allowed) == list(Config.model_fields)


def test_misspelt_required_key_is_one_problem(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(MINIMAL.replace("layers", "layer"))
    error = error_of(path)
    assert (error.key, error.nearest) == ("model.layer", "model.layers")
    assert str(error).count("\n") == 0


WRONG_VALUES = {
    "optimizer.lr='1e-4'": '"1e-4" is text; drop the quotes',
    "optimizer.lr=-0.1": "-0.1 is too small",
    "optimizer.lr=0": "0 is too small (allowed: a number, above 0)",
    "optimizer.lr=nan": "nan is no finite number",
    "optimizer.lr=inf": "inf is no finite number",
    "optimizer.lr=true": "true is no number",
    "optimizer.betas=[0.9]": "no pair of numbers",
    "optimizer.betas=[0.9, 1.0]": "no pair of numbers",
    "optimizer.name=sgd": '"sgd" is not known (allowed: "adamw")',
    "optimizer.decay=none": 'allowed: "matrices", "all"',
    "lr.schedule=poly": 'allowed: "constant", "linear", "cosine"',
    "batch.microbatch=0": "0 is too small (allowed: a whole number, at least 1)",
    "model.layers=true": "true is no number",
    "model.layers=4.0": "4.0 is no whole number",
    "model.layers='4'": '"4" is text; drop the quotes',
    "model.layers=many": '"many" is text (allowed',
    "model.hidden=4294967296": "4294967296 is too large (at most 2147483647)",
    "model.dropout=1": "1 is too large (allowed: a number, at least 0 and below 1)",
    "model.dropout=-0.1": "-0.1 is too small",
    "model.tie_embeddings='true'": '"true" is text; drop the quotes (allowed: true or false)',
    "model.tie_embeddings=1": "1 has the wrong type (allowed: true or false)",
    "run.name=5": "5 is no text (allowed: text in quotes)",
    "run.name=''": "is empty",
    "run.seed=-1": "-1 is too small",
    "run.time_limit=3600": '3600 has no unit (allowed: text with units, as "3600s")',
    "run.time_limit='3600'": '"3600" is no duration',
    "run.time_limit=-1h": '"-1h" is no duration (allowed: numbers with the units d, h, m, s or ms',
    "run.time_limit=3h50": '"3h50" is no duration',
    "run.time_limit=0s": '"0s" is no duration',
    "run.name=a/b": "is no name of one folder",
    "run.name=..": "is no name of one folder",
    "run.dir=''": "is empty",
    "run.dir=~/x": '"~/x" names a home folder, which only a shell looks up (allowed: a whole path',
    "data.train=['a.h5', '~me/b.h5']": "names a home folder",
    "run.dir=" + "n" * 256: "is too long for a path (allowed: at most 255 bytes a folder",
    "run.resume=" + "n/" * 1501: "is too long for a path",
    "model.layers=2001": "2001 is too large (at most 2000)",
    "trace.last_step=0": "0 is too small (allowed: a whole number, at least 1)",
    "log.every_steps=0": "0 is too small (allowed: a whole number, at least 1)",
    "checkpoint.keep_last=-1": "-1 is too small (allowed: a whole number, at least 0)",
    'data.train=["a.h5"': "this begins as TOML and is none; close quotes and brackets",
    "run.name='x": "this begins as TOML and is none",
    "data.train=[1]": "is no text",
    "data.train={}": "a table is no list of texts",
    "pipeline.partition=best": '"best" is not known',
    "pipeline.partition=[]": "[] is no split",
    "pipeline.partition=[4, 0, 4]": "[4, 0, 4] is no split",
    "pipeline.ranks=0": "0 is too small",
    "pipeline.ranks=2.5": "2.5 is no whole number (allowed: a whole number, at least 1)",
    "comm.timeout_s=0": "0 is too small",
}


@pytest.mark.parametrize(("override", "part"), WRONG_VALUES.items())
def test_wrong_value(run_file, override, part):
    error = error_of(run_file, override)
    assert part in str(error)
    assert error.key == override.split("=")[0]
    assert error.allowed or "begins as TOML" in part


LATER = {
    "pipeline.replicas=2": "1",
    "precision.compute=bfloat16": '"float32"',
    "precision.compute=float16": '"float32"',
    "pipeline.recompute=block": '"none"',
    "optimizer.shard=true": "false",
    "model.family=llama": '"gpt2"',
    "checkpoint.background=true": "false",
    "checkpoint.on_disk_trouble=retry": '"end"',
    "data.format=megatron": '"auto", "h5"',
    "log.tensorboard=true": "false",
}


@pytest.mark.parametrize(("override", "allowed"), LATER.items())
def test_value_of_a_later_version_is_refused(run_file, override, allowed):
    error = error_of(run_file, override)
    assert error.key == override.split("=")[0]
    assert "this version does not have" in str(error)
    assert str(error).endswith(f"(allowed: {allowed})")


@pytest.mark.parametrize("key", LATER_KEYS)
def test_key_of_a_later_version_is_refused(run_file, key):
    error = error_of(run_file, f"{key}=2")
    assert error.key == key
    assert error.nearest is None
    assert "this version does not have this key yet" in str(error)


def test_later_tables_name_real_keys_only():
    fields = section_fields(Config)
    known = {f"{section}.{key}" for section, keys in fields.items() for key in keys}
    assert set(LATER_VALUES) | set(ONLY_NOW) <= known
    assert not set(LATER_KEYS) & known
    for key, only in ONLY_NOW.items():
        section, name = key.split(".")
        assert fields[section][name].default == only


def test_every_key_has_a_description():
    for section, keys in section_fields(Config).items():
        for key, field in keys.items():
            assert field.description, f"{section}.{key}"


def test_missing_sizes_are_all_named(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[model]\nvocab = 300\n")
    lines = str(error_of(path)).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["model.layers", "model.hidden", "model.heads", "model.sequence"]
    assert all(line.startswith(f"{path}: ") and "this key is required" in line for line in lines)


def test_a_script_with_layers_of_its_own_needs_no_model_section(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[run]\nsteps = 3\n[pipeline]\nranks = 50\n")
    config = Config.load(path)
    assert config.model is None
    assert Config.from_toml(config.to_toml()) == config
    with pytest.raises(ConfigError, match=r"a\.toml: model: this section is required here"):
        config.needed_model(path)


def test_several_problems_are_one_error_of_several_lines(run_file):
    error = error_of(run_file, "batch.microbatchs=2", "optimizer.lr=-1", "model.layers='8'")
    lines = str(error).splitlines()
    assert len(lines) == 3
    assert error.key == "batch.microbatchs"
    assert "model.layers" in lines[1]
    assert "optimizer.lr" in lines[2]


def test_eval_with_validation_tokens_is_fine(run_file):
    assert Config.load(run_file, ["eval.every_steps=5", 'data.validation=["v.h5"]']).eval.every_steps == 5


def test_more_stages_than_layers_names_the_largest_chunks(run_file):
    error = error_of(run_file, "pipeline.ranks=3", "pipeline.chunks=3")
    assert isinstance(error, PartitionError)
    assert error.key == "pipeline.chunks"
    assert "9 stages, more than model.layers = 8" in str(error)
    assert error.allowed == "at most 2 with 3 ranks"


def test_override_values(run_file):
    overrides = ["run.name=x y", "data.train=[ 'a.h5', \"b.h5\" ]", "model.dropout=0", "run.time_limit=1h30m"]
    config = Config.load(run_file, [*overrides, "run.seed=2", "run.seed=2", "data.validation=v.h5"])
    assert config.run.name == "x y"
    assert config.run.dir == "runs/x y"
    assert config.data.train == ("a.h5", "b.h5")
    assert config.data.validation == ("v.h5",)
    assert isinstance(config.model.dropout, float)
    assert config.run.seed == 2
    assert config.run.time_limit_s == 5400.0


@pytest.mark.parametrize("text", ["", "model", "model.layers", "layers=3", ".x=3", "model.=3", "=3", "model=3"])
def test_what_is_no_setting(run_file, text):
    error = error_of(run_file, text)
    assert error.file == "--set"
    assert error.allowed == "section.key=value"


def test_two_settings_for_one_key_are_refused(run_file):
    error = error_of(run_file, "run.seed=1", "run.steps=3", "run.seed = 2")
    assert str(error) == "--set: run.seed: given twice, as 1 and as 2: keep one"


def test_a_glob_in_brackets_is_text(run_file):
    assert Config.load(run_file, ["data.train=[ab]*.h5"]).data.train == ("[ab]*.h5",)


def test_the_folder_follows_every_name(run_file):
    assert Config.load(run_file, ["run.name=a\u00a0b"]).run.dir == "runs/a\u00a0b"


def test_resolve_names_the_setting(run_file):
    with pytest.raises(TopologyError) as caught:
        Config.load(run_file, ["pipeline.ranks=4"]).resolve(3, run_file, ["pipeline.ranks=4"])
    assert str(caught.value).startswith("--set: pipeline.ranks: this setting asks for 4 ranks, the launch has 3 ")


def test_override_cannot_smuggle_a_second_key(run_file):
    assert Config.load(run_file, ["run.name=1\nx = 2".replace("\n", " ")]).run.name == "1 x = 2"
    assert "control character" in str(error_of(run_file, 'run.name="a"\nx = 2'))


def test_files_that_are_none(tmp_path):
    missing = tmp_path / "none.toml"
    assert str(error_of(missing)) == f"{missing}: no such file"
    assert str(error_of(tmp_path)) == f"{tmp_path}: is a directory, and a run file is needed"
    broken = tmp_path / "broken.toml"
    broken.write_text("model = []\nlr = 3\n[run]")
    assert "it must be a table" in str(error_of(broken))


def test_resolve_fills_in_the_ranks(run_file):
    config = Config.load(run_file)
    assert config.resolve(4).pipeline.ranks == 4
    assert config.pipeline.ranks is None
    assert config.resolve(4).resolve(4) == config.resolve(4)


def test_resolve_refuses_another_number_of_ranks(run_file):
    config = Config.load(run_file, ["pipeline.ranks=4"])
    with pytest.raises(TopologyError) as caught:
        config.resolve(3, file="small.toml", command="mpipipe eval small.toml --set run.name=a")
    error = caught.value
    assert (error.key, error.value, error.file) == ("pipeline.ranks", 4, "small.toml")
    assert "asks for 4 ranks, the launch has 3 (MPI world size 3)" in str(error)
    remedy = "start 'mpirun -n 4 mpipipe eval small.toml --set run.name=a', or remove pipeline.ranks to use all"
    assert str(error).endswith(remedy)


def test_resolve_checks_the_split(run_file):
    with pytest.raises(PartitionError, match=r"at most 4 with 2 ranks"):
        Config.load(run_file, ["pipeline.chunks=5"]).resolve(2)
    with pytest.raises(PartitionError, match=r"at most 8"):
        Config.load(run_file).resolve(9)
    with pytest.raises(PartitionError, match=r"9 chunks a rank on 1 rank make 9 stages, .*at most 8 with 1 rank\)"):
        Config.load(run_file).model_copy(update={"pipeline": PipelineSection(chunks=9, schedule="gpipe")}).resolve(1)
    with pytest.raises(PartitionError, match=r"is a list of 2, and pipeline.ranks = 3 .*a list of 3 numbers"):
        Config.load(run_file, ["pipeline.partition=[4, 4]"]).resolve(3)


def test_require(run_file):
    config = Config.load(run_file)
    with pytest.raises(ConfigError) as caught:
        config.require("data.train", "data.validation", file=run_file)
    assert caught.value.key == "data.train"
    assert str(caught.value).count("\n") == 1
    config.require("model.layers", "run.steps")


def test_a_key_that_the_problem_begins_with_is_not_said_twice():
    assert str(ConfigError("run.steps = 3 is odd", file="a.toml", key="run.steps")) == "a.toml: run.steps = 3 is odd"
    assert str(ConfigError("run.steps are few", file="a.toml", key="run")) == "a.toml: run: run.steps are few"


def test_frozen_and_strict(run_file):
    config = Config.load(run_file)
    with pytest.raises(ValidationError):
        config.model.layers = 9
    assert not dataclasses.is_dataclass(config)


def test_round_trip(run_file, tmp_path):
    overrides = [
        'run.name="a \\"quoted\\" \\\\ näme #1"',
        "run.dir='/x/ÿ'",
        "optimizer.lr=1e-30",
        "lr.min_lr=0",
        "pipeline.partition=[3, 5]",
        'data.train=["a,b.h5", "[c]"]',
        "run.seed=9223372036854775807",
        "optimizer.eps=1e22",
        "model.tie_embeddings=false",
        "trace.last_step=7",
        "run.time_limit=2h",
    ]
    changed = Config.load(run_file, overrides)
    for config in (Config.load(run_file), changed, changed.resolve(2)):
        copy = tmp_path / "other-name.toml"
        copy.write_text(config.to_toml())
        assert Config.load(copy) == config
        assert Config.from_toml(config.to_toml()) == config
        assert Config.load(copy).to_toml() == config.to_toml()


def test_from_tables():
    sizes = {"layers": 2, "hidden": 8, "heads": 2, "sequence": 4}
    assert Config.from_tables({"model": sizes}).model.ffn_hidden == 32
    with pytest.raises(ConfigError) as caught:
        Config.from_tables({"model": {**sizes, "depth": 3}})
    assert caught.value.file is None
