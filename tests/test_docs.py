"""The pages against the code: links, paths, commands, keys, messages and examples in README, CONTRIBUTING and docs/."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import typer

from mpipipe.cli.app import build_app
from mpipipe.config import Config
from mpipipe.formats import checkpoint as checkpoint_files
from mpipipe.formats import trace_layout
from mpipipe.formats.tokens import Source, write_tokens
from mpipipe.formats.trace import TraceWriter
from mpipipe.schedule import Kind, ScheduleTable, build, names
from mpipipe.schedule.exchange import TABLE_FORMS, csv_file, save_table, table_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMATS = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; "" for those without."""
    return [body for found, body in FENCE.findall(text) if found == language]


def section(text: str, heading: str) -> str:
    """What lies under a heading, up to the next of its level or a higher one."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- links and paths ---


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_path_of_the_repository_that_is_named_exists(page: Path) -> None:
    """Also with words of a command around it; and a test that is named is somewhere under tests/."""
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(TESTS.values()), re.MULTILINE))
    for span in spans(page.read_text(encoding="utf-8")):
        for word in span.split():
            if re.match(r"(mpipipe|tests|tools|jobs|docs)/", word) and not re.search("[A-Z*<]", word):
                assert (ROOT / word).exists(), f"{span}: no such path"
        if re.fullmatch(r"test_\w+", span):
            assert span in tests, f"{span}: no such test"


def tree() -> list[tuple[str, str]]:
    """(path, first word of the caption) of every line of the README's tree."""
    (body,) = [body for body in blocks(README, "") if body.startswith("mpipipe/\n")]
    found, top = [], ""
    for line in body.splitlines():
        name, _, caption = line.strip().partition(" ")
        if line.startswith(" "):
            found.append((f"{top}{name}", caption.split()[0]))
        else:
            top = name
    return found


def test_the_tree_is_the_repository() -> None:
    paths = [path for path, _ in tree()]
    assert len(paths) == len(set(paths))
    for path in paths:
        assert (ROOT / path).exists(), f"{path} is in the tree only"
        assert path.endswith("/") == (ROOT / path).is_dir(), path
    for folder in ("mpipipe", "tools", "docs", "jobs/configs"):
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__" and (entry.is_file() or any(entry.rglob("*.py"))):
                assert page_id(entry) + "/" * entry.is_dir() in paths, f"{page_id(entry)} is not in the tree"


def test_the_floors_of_the_tree_are_those_that_are_enforced() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    enforced = [{room.strip() for room in layer.split("|")} for layer in contract["layers"]]
    drawn: dict[str, set[str]] = {}
    for path, floor in tree():
        if path.startswith("mpipipe/") and re.fullmatch(r"F\d+[a-z]?", floor):
            drawn.setdefault(floor, set()).add(path.removeprefix("mpipipe/").removesuffix("/").removesuffix(".py"))
    assert list(drawn.values()) == enforced
    order = [(int(re.sub(r"\D", "", floor)), floor) for floor in drawn]
    assert order == sorted(order, reverse=True)


# --- commands and keys ---


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every ``mpipipe VERB ...`` of a page: in inline code, and in fenced blocks that are no code."""
    lines = [line for body in blocks(text, "") for line in body.splitlines()]
    for place in [*spans(text), *lines]:
        match = re.search(r"(^|[\s/'])mpipipe (?=[a-z-])(.*)", place)
        if match:
            rest = re.split(r"\s#\s", match[2].split("'")[0] if match[1] == "'" else match[2])[0]
            yield shlex.split(rest)


def check_command(arguments: list[str]) -> None:
    """Raises for a verb or an option that is not there, or a value that is refused; arguments may be left out."""
    command: Any = typer.main.get_command(build_app())
    rest = list(arguments)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"mpipipe {' '.join(arguments)}: no verb {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    if not rest or rest == ["--help"]:
        return
    try:
        command.make_context(command.name, rest)
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise AssertionError(f"mpipipe {' '.join(arguments)}: {error}") from error


def test_every_command_that_is_quoted_is_understood() -> None:
    found = [arguments for page in PAGES for arguments in commands(page.read_text(encoding="utf-8"))]
    assert ["schedule", "show", "1f1b", "-p", "3", "-m", "4"] in found
    assert len(found) > 20
    for arguments in found:
        check_command(arguments)


@pytest.mark.parametrize("wrong", ["checkpoint repair x", "plan run.toml --rank 3", "schedule show x -p many"])
def test_a_wrong_command_would_be_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_command(wrong.split())


def known_keys() -> set[str]:
    config = Config.from_tables({"model": {"layers": 1, "hidden": 1, "heads": 1, "sequence": 1}})
    return {f"{name}.{key}" for name, value in config for key in type(value).model_fields}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_key_that_is_named_exists(page: Path) -> None:
    known = known_keys()
    sections = "|".join({key.split(".")[0] for key in known})
    for span in spans(page.read_text(encoding="utf-8")):
        for key in re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_]+(?!\.?\w|\()", span):
            if key.split(".")[1] not in ("toml", "py", "sh", "md"):
                assert key in known, f"{span}: no key {key}"


def test_the_page_of_the_run_file_has_every_key_with_its_default() -> None:
    page = (ROOT / "docs" / "run_file.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (.+?) \|", page, re.MULTILINE))
    assert set(rows) == known_keys()
    config = Config.from_tables({"model": {"layers": 1, "hidden": 2, "heads": 1, "sequence": 1}})
    written = tomllib.loads(config.to_toml())
    for key, shown in rows.items():
        name, leaf = key.split(".")
        if type(getattr(config, name)).model_fields[leaf].is_required():
            assert shown == "required", key
        elif key == "model.ffn_hidden":
            assert shown == "4 · `model.hidden`"
            assert written[name][leaf] == 8
        elif shown == "none":
            assert leaf not in written[name], key
        else:
            assert tomllib.loads(f"value = {shown.strip('`')}")["value"] == written[name][leaf], key


def test_the_schedules_that_are_listed_are_those_there_are() -> None:
    listed = re.search(r"^- Schedules: ([^.]*)\.", README, re.MULTILINE)
    assert listed
    assert tuple(re.findall(r"`([^`]+)`", listed[1])) == names()


# --- examples ---


def test_the_schedule_example_prints_what_stands_below_it() -> None:
    source = blocks(README, "python")[1]
    expected = README.split(f"```python\n{source}```\n\n```\n")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})
    assert printed.getvalue() == expected


@pytest.mark.slow
def test_the_training_example_trains(tmp_path: Path) -> None:
    (run_file,) = blocks(README, "toml")
    (tmp_path / "run.toml").write_text(run_file, encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks(README, "python")[0], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start() -> list[str]:
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    begin, *lines = start()
    assert begin == "starts at step 0"
    printed = [line.split() for line in lines]
    assert [int(step) for step, _ in printed] == [50, 100, 150, 200]
    assert float(printed[-1][1]) < float(printed[0][1]) / 2
    saved = sorted(path.name for path in (tmp_path / "runs" / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000100", "step-00000200"]
    assert start() == ["starts at step 200"]


# --- docs/formats.md ---


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_field_of_a_trace_is_described() -> None:
    page = section(FORMATS, "## Trace files")
    events = section(page, "### `/events`: one row an event, 60 bytes")
    others = section(page, "### The other objects")
    assert set(trace_layout.EVENT_DTYPE.names or ()) <= names_in(events)
    for dtype in (trace_layout.CLOCK_DTYPE, trace_layout.STEP_DTYPE, trace_layout.MODEL_DTYPE):
        assert set(dtype.names or ()) <= names_in(others)
    kinds = re.findall(r"^\| `(\w+)` \| (\d+) \| (busy)? *\|", events, re.MULTILINE)
    busy = trace_layout.COMPUTE_KINDS
    assert kinds == [(kind.name, str(int(kind)), "busy" * (kind in busy)) for kind in trace_layout.EventKind]


def test_every_attribute_and_object_of_a_trace_is_described(tmp_path: Path) -> None:
    page = names_in(section(FORMATS, "## Trace files"))
    writer = TraceWriter(tmp_path / "rank-00000.h5", dict.fromkeys(("rank", "world_size", "p", "v", "d", "segment"), 1))
    writer.add_schedule(0, [["0F0", "0B0"]], [0])
    writer.set_model([{"stage": 0}])
    writer.close()
    with h5py.File(tmp_path / "rank-00000.h5") as file:
        assert set(file.attrs) <= page
        assert {f"/{key}" for key in file if key != "schedule"} <= page | {"/events"}
        assert {f"/schedule/<id>/{key}" for key in file["schedule/0"]} <= page


def test_every_field_of_a_manifest_is_described(tmp_path: Path) -> None:
    page = section(section(FORMATS, "## Checkpoints"), "### `manifest.json`")
    manifest = checkpoint_files.make_manifest(1, {"shard-0000.h5": 1}, [], {}, {}, "")
    written = json.loads(checkpoint_files.write_manifest(tmp_path, manifest).read_text())
    assert set(written) == set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w.*?) \|", page, re.MULTILINE))))
    assert {field.name for field in fields(checkpoint_files.TensorEntry)} <= names_in(page)
    assert set(written["files"][0]) <= names_in(page)


def test_every_object_of_a_token_file_is_described(tmp_path: Path) -> None:
    page = names_in(section(FORMATS, "## Token files"))
    path = tmp_path / "tokens.h5"
    write_tokens(path, [np.arange(3)], 256, "a.json", [Source("a.txt", 3, "xxh3:0")], tokenizer_json="{}")
    found: list[str] = []
    with h5py.File(path) as file:
        found += file.attrs
        file.visititems(lambda name, item: found.append(f"/{name}") if isinstance(item, h5py.Dataset) else None)
    assert len(found) == 11
    assert set(found) <= page


def test_every_object_of_a_schedule_file_is_described(tmp_path: Path) -> None:
    page = FORMATS.partition("\n## Schedule tables\n")[2]  # the header lines in it look like headings
    rows = [["0F0", "1F1", "0UNSHARD"], ["1F0", "0F1"]]
    save_table(ScheduleTable.from_rows(rows, placement=[0, 1], mirror=[1, 0]), tmp_path / "table.h5")
    found: list[str] = []
    with h5py.File(tmp_path / "table.h5") as file:
        found += file.attrs
        file.visititems(lambda name, item: found.append(f"/{name}") if isinstance(item, h5py.Dataset) else None)
    assert len(found) == 18
    assert set(found) <= names_in(section(page, "### HDF5"))
    header = re.findall(r"^\| (`.*?) \|", page.partition("| header line |")[2].partition("\n\n")[0], re.MULTILINE)
    assert set(csv_file.KEYS) <= set(re.findall(r"`(\w+)`", "".join(header)))
    kinds = re.search(r"`/kinds` \|[^|]*\| (.*?) \|", page)
    assert kinds
    assert kinds[1] == ", ".join(f"{kind.name} {kind.value}" for kind in Kind)


def test_the_schedule_file_that_is_shown_is_the_one_that_is_written() -> None:
    page = FORMATS.partition("\n## Schedule tables\n")[2]
    assert table_text(build("1f1b", p=2, m=2), "csv") in blocks(page, "")
    written = {match[1] for match in re.finditer(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)}
    assert set(TABLE_FORMS) <= written


def test_every_field_of_the_metrics_is_described() -> None:
    from mpipipe.trainer import StepReport

    page = names_in(section(FORMATS, "## The run folder"))
    assert set(StepReport(1, 1.0, 1.0, 1.0, 1, 1.0, 0.0, "why").as_metrics()) <= page


# --- docs/troubleshooting.md ---


def texts_of_the_code() -> str:
    """Every text of the package, one after another; what is filled in is a NUL character."""
    found = []
    for path in sorted((ROOT / "mpipipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]", "\0", node.value))
    return "\n\n".join(found)


def test_every_message_that_is_quoted_is_in_the_code() -> None:
    page = prose((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    places = re.findall(r"^### (\".*)$|^\| (?:files|[^\"|]*)?(\".*?) \|", page, re.MULTILINE)
    quoted = [text for heading, cell in places for text in re.findall(r'"([^"]+)"', heading or cell)]
    assert len(quoted) > 50
    code = texts_of_the_code()
    for text in quoted:
        pattern = re.escape(text).replace(r"\.\.\.", ".*").replace(r"\ ", " ")
        assert re.search(re.sub(r"\d+", r"(?:\\d+|\0)", pattern), code), f"no message {text!r} in the code"
