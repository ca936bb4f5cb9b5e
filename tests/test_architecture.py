"""The house rules that a machine can check: floors, foreign packages, light imports, budgets, words."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpipipe"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OFFLINE_TOOLS = [path for path in TOOLS if path.name.startswith(("trace_", "checkpoint_"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
DRAWERS = {"utils", "util", "helpers", "helper", "common", "core", "manager", "base", "misc"}

# Which modules may import a foreign package at all. A name ending in "/" stands for all below it.
FOREIGN = {
    "h5py": ("formats/",),
    "mpi4py": ("transport/mpi.py",),
    "cupy": ("device/",),
    "tokenizers": ("data/tokenizer.py",),
}

# Rooms that must be usable without these packages.
HEAVY = ("mpi4py", "torch", "cupy")
TERMINAL = ("pydantic", "typer", "rich")
LIGHT_ROOMS = {
    "topology": HEAVY + TERMINAL,
    "formats": HEAVY + TERMINAL,
    "schedule": HEAVY + TERMINAL,
    "partition": HEAVY,
    "analysis": HEAVY + TERMINAL,
    "planner": HEAVY,
    "config": HEAVY,
}


def where(path):
    return path.relative_to(ROOT).as_posix()


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_packages(tree):
    """The top names of all imports in a file, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_the_sources_are_found():
    assert PACKAGE / "errors.py" in SOURCES
    assert len(SOURCES) > 10


def test_imports_only_go_down_the_floors():
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", FOREIGN)
def test_a_foreign_package_is_imported_in_one_place_only(package):
    allowed = FOREIGN[package]
    for path in SOURCES:
        inside = path.relative_to(PACKAGE).as_posix()
        if package in imported_packages(parse(path)):
            assert any(inside == place or (place.endswith("/") and inside.startswith(place)) for place in allowed), (
                f"{where(path)} imports {package}; only {', '.join(allowed)} may"
            )


def test_what_launches_ranks_is_marked_and_in_one_folder():
    """tools/test.sh runs ``-m mpi`` over each MPI library, and the rest once."""
    marked = [path for path in TESTS if path.name.startswith("test_") and path.parent.name == "mpi"]
    assert len(marked) > 1
    for path in marked:
        assert "\npytestmark = pytest.mark.mpi\n" in path.read_text(encoding="utf-8"), f"{where(path)} is not marked"
    for path in TESTS:
        if path not in marked:
            assert "launch" not in imported_packages(parse(path)), f"{where(path)} launches ranks outside of tests/mpi"


def modules_of(room):
    """The dotted names of all modules of a room, be it a folder or a file; none if there is no such room."""
    if (PACKAGE / f"{room}.py").is_file():
        return [f"mpipipe.{room}"]
    files = sorted((PACKAGE / room).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


def import_without(blocked, modules, scripts=()):
    """Import modules, and load scripts, in a new interpreter in which ``blocked`` packages can't be imported."""
    code = (
        "import sys, importlib, runpy\n"
        "blocked, modules, scripts = (text.split(';') if text else [] for text in sys.argv[1:4])\n"
        "sys.modules.update(dict.fromkeys(blocked))\n"
        "for name in modules: importlib.import_module(name)\n"
        "for path in scripts: runpy.run_path(path, run_name='not_main')\n"
        "drawn = [name for name in sys.modules if name.split('.')[0] == 'matplotlib']\n"
        "assert not drawn, f'matplotlib was imported although nothing is drawn'\n"
    )
    arguments = [";".join(blocked), ";".join(modules), ";".join(str(path) for path in scripts)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT / "tests",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"without {', '.join(blocked)}:\n{done.stderr}"


def test_importing_the_package_is_light():
    import_without((*HEAVY, *TERMINAL, "numpy", "h5py"), ["mpipipe", "mpipipe.errors"])


@pytest.mark.parametrize("room", [room for room in LIGHT_ROOMS if modules_of(room)])
def test_a_room_is_usable_without_heavy_packages(room):
    import_without(LIGHT_ROOMS[room], ["mpipipe", *modules_of(room)])


def test_blocking_works():
    with pytest.raises(AssertionError, match="h5py"):
        import_without(("h5py",), ["mpipipe.formats.hdf5"])


def test_offline_tools_need_numpy_and_h5py_only():
    assert OFFLINE_TOOLS
    import_without((*HEAVY, *TERMINAL, "mpipipe", "xxhash"), [], OFFLINE_TOOLS)


def test_the_command_line_starts_without_torch_and_mpi():
    import_without(HEAVY, modules_of("cli"))


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS, *TESTS], ids=where)
def test_no_file_and_no_function_is_too_long(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{where(path)} has {lines} lines; {MAX_FILE_LINES} is the budget"
    for function in functions_of(parse(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, (
            f"{where(path)}: {function.name} has {length} lines; {MAX_FUNCTION_LINES} is the budget"
        )


def test_nothing_prints_outside_the_command_line():
    for path in SOURCES:
        if path.is_relative_to(PACKAGE / "cli"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                pytest.fail(f"{where(path)}:{node.lineno} prints; use logging, or return the text")


def test_no_drawers():
    for path in (*PACKAGE.rglob("*"), *(ROOT / "tools").rglob("*")):
        words = set(path.stem.lower().split("_"))
        assert not words & DRAWERS, f"{where(path)}: a name says what is in it; {words & DRAWERS} does not"


def test_the_root_logger_is_left_alone():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Attribute)
                or not isinstance(node.func.value, ast.Name)
            ):
                continue
            if node.func.value.id == "logging":
                assert node.func.attr not in (
                    "basicConfig",
                    "debug",
                    "info",
                    "warning",
                    "error",
                    "exception",
                    "critical",
                ), f"{where(path)}:{node.lineno} uses the root logger"
                assert node.func.attr != "getLogger" or node.args, f"{where(path)}:{node.lineno} takes the root logger"


def test_no_global_is_changed_after_import():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            assert not isinstance(node, ast.Global), f"{where(path)}:{node.lineno} changes a global"


def test_nothing_reads_the_folder_beside_the_project():
    beside = "shared" + "/"
    for path in (*SOURCES, *TOOLS, *(ROOT / "tools").glob("*.sh"), *TESTS):
        assert f"../{beside}" not in path.read_text(encoding="utf-8"), where(path)
