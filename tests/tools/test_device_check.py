"""tools/device_check.py: its dry run on the CPU end to end; and that whatever a check does, the others and the report
come.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.late import LateDriver

from mpipipe.device import HostDevice, StreamDevice
from mpipipe.device.streams import PART_BYTES

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import device_check
import device_check_bits
import device_check_copies
import device_check_runs
import device_check_there
import device_check_wheels
from device_check import Check, Report, Result
from device_check_answers import last_words

pytestmark = pytest.mark.slow

TOOLS = Path(device_check.__file__).parent
GOOD = (
    "import json, sys; answer = dict(case='a', level='ok', text='fine', figures={}); "
    "open(sys.argv[2], 'a').write(json.dumps(answer) + '\\n')"
)


def check(name: str, code: str, limit_s: float = 20.0) -> Check:
    return Check(name, name, (sys.executable, "-c", code), limit_s)


def report_of(*checks: Check, minutes: float = 2.0, output: Path | None = None) -> Report:
    report = Report({"device": "a GPU", "small": True}, output)
    device_check.run_all(checks, report, minutes)
    return report


def levels(report: Report) -> list[tuple[str, str]]:
    return [(row.check, row.level) for row in report.results]


# --- the dry run ---


def start(*arguments: str, **kinds: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOLS / "device_check.py"), *arguments]
    return subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **kinds)


def test_a_dry_run_on_the_cpu(tmp_path: Path) -> None:
    process = start("--device", "cpu", "--small", "--no-mpi", "--minutes", "9", "--output", str(tmp_path),
                    cwd=tmp_path)  # fmt: skip
    output, _ = process.communicate(timeout=600)
    short = json.loads(output.splitlines()[-1])
    (page,) = tmp_path.glob("*.md")
    written = page.read_text(encoding="utf-8")
    found = json.loads(written.split("```json\n")[1].split("\n")[0])
    assert [[row[key] for key in ("check", "case", "level")] for row in found["results"]] == short["results"]
    assert short["file"] == str(page)
    rows = {(row["check"], row["case"]): row for row in found["results"]}
    bad = [row for row in found["results"] if row["level"] not in ("ok", "absent")]
    assert not bad
    assert process.returncode == 0
    assert list(found["seconds"]) == [one.name for one in device_check.CHECKS]
    for p in (2, 4):
        text = rows["bits", f"{p} threads, host"]["text"]
        assert text.startswith("1f1b, interleaved v=2, zb-h1, zb-v v=2, gpipe: 3 steps")
        assert "equal bit for bit" in text
    for twin in ("host", "late, staged", "late, cuda-aware"):
        assert rows["contract", twin]["figures"]["passed"] >= 13
    assert rows["engine", "engine over plain"]["figures"]["ratio"] > 0
    assert len(rows["idle", "2 threads"]["figures"]["ranks"]) == 2
    assert len(rows["memory", "1f1b, 4 threads"]["figures"]["ranks"]) == 4
    absent = {key for key, row in rows.items() if row["level"] == "absent"}
    assert {("staged", "copies"), ("memory", "peak memory"), ("aware", "route"), ("there", "MPI")} <= absent
    assert page.name == f"cpu-dry-run_{found['date']}.md"
    assert "| bits | 4 threads, host | ok |" in written


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_check_says_so(tmp_path: Path) -> None:
    process = start("--no-mpi", "--only", "bits", "staged", cwd=tmp_path)
    output, _ = process.communicate(timeout=300)
    found = json.loads(output.splitlines()[-1])
    assert process.returncode == 0
    rows = {row["check"]: row for row in found["results"] if row["check"] != "there"}
    assert {row["level"] for row in rows.values()} == {"absent"}
    assert all("needs a GPU" in row["text"] for row in rows.values())


def test_who_ends_it_gets_what_was_found(tmp_path: Path) -> None:
    process = start("--device", "cpu", "--small", "--no-mpi", "--only", "bits", "contract", cwd=tmp_path,
                    stderr=subprocess.PIPE)  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("bits"):
            break
    time.sleep(0.3)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    found = json.loads(output.splitlines()[-1])
    assert process.returncode == 1
    assert found["counts"]["ok"] > 3
    assert [row["check"] for row in found["results"][-2:]] == ["bits", "device_check"]
    assert all(row["text"].startswith("ended from outside (SIGTERM)") for row in found["results"][-2:])


# --- checks that go wrong ---


def test_a_check_that_kills_itself_keeps_its_answers_and_the_next_one_runs() -> None:
    kill = f"{GOOD}; import os; print('its last words', flush=True); os.kill(os.getpid(), 9)"
    report = report_of(check("one", kill), check("two", GOOD))
    assert levels(report) == [("one", "ok"), ("one", "crashed"), ("two", "ok")]
    assert report.results[1].text == "ended by SIGKILL; last words: its last words"
    assert report.is_bad


def test_a_check_that_hangs_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores a polite signal, and so does what it started in a session of its own."""
    monkeypatch.setattr(device_check, "ENDS_WITHIN_S", 0.5)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    starts = (
        "import subprocess, sys; "
        f"open({str(tmp_path / 'started')!r}, 'w').write(str(subprocess.Popen([sys.executable, '-c', {stubborn!r} + "
        "'time.sleep(300)'], start_new_session=True).pid)); "
    )
    report = report_of(check("one", f"{GOOD}; {stubborn}{starts}time.sleep(300)", limit_s=1.5), check("two", GOOD))
    assert levels(report) == [("one", "ok"), ("one", "late"), ("two", "ok")]
    assert "no end within 2 s" in report.results[1].text
    started = int((tmp_path / "started").read_text())
    deadline = time.monotonic() + 5
    while _lives(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(started)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    "code, text",
    [
        ("import sys; open(sys.argv[2], 'wb').write(b'\\xff\\x00{\\n[1]\\n{}\\n')", "3 answers make no sense"),
        (GOOD.replace("'ok'", "'splendid'"), "1 answers make no sense"),
        ("print('talks, and answers nothing')", "no answer; last words: talks, and answers nothing"),
        ("raise RuntimeError('this and that')", "exit code 1"),
        ("import sys; sys.exit(3)", "exit code 3; last words: none"),
    ],
)
def test_nonsense_is_a_result(code: str, text: str) -> None:
    report = report_of(check("one", code), check("two", GOOD))
    assert levels(report) == [("one", "crashed"), ("two", "ok")]
    assert text in report.results[0].text


def test_a_check_that_does_not_start_is_a_result() -> None:
    report = report_of(Check("one", "one", ("no-such-program",), 5.0), check("two", GOOD))
    assert levels(report) == [("one", "crashed"), ("two", "ok")]


def test_once_the_time_is_over_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "LEAST_S", 0.5)
    begun = time.monotonic()
    sleeps = check("one", f"{GOOD}; import time; time.sleep(300)")
    report = report_of(sleeps, check("two", GOOD), check("three", GOOD), minutes=1.5 / 60)
    assert levels(report) == [("one", "ok"), ("one", "late"), ("two", "no time"), ("three", "no time")]
    assert report.results[-1].text == "not run: time (three)"
    assert time.monotonic() - begun < 10


def test_what_a_check_finds_out_later_ones_are_given() -> None:
    tells = "import json, sys; open(sys.argv[2], 'a').write(json.dumps(dict(settings=dict(launcher=['x']))) + '\\n'); "
    asks = (
        "import json, sys; given = json.loads(sys.argv[1]); open(sys.argv[2], 'a').write(json.dumps(dict(case='a', "
        "level='ok', text=str(given['launcher']) + given['device'], figures={})) + '\\n')"
    )
    report = report_of(check("one", tells + GOOD), check("two", asks))
    assert report.results[-1].text == "['x']a GPU"


def test_the_report_is_written_after_every_check(tmp_path: Path) -> None:
    page = tmp_path / "deep" / "result.md"
    looks = f"import sys; text = open({str(page)!r}).read(); assert '| one | a | ok | fine |' in text; " + GOOD
    report = report_of(check("one", GOOD), check("two", looks), output=page)
    assert levels(report) == [("one", "ok"), ("two", "ok")]
    assert "| two | a | ok | fine |" in page.read_text()


def test_a_report_that_can_t_be_written_is_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    report = report_of(check("one", GOOD), output=tmp_path / "file" / "result.md")
    assert levels(report) == [("one", "ok")]
    assert "can't be written" in capsys.readouterr().err


def test_a_text_breaks_neither_table() -> None:
    report = Report({"device": "cpu", "small": False}, None)
    report.add([Result("one", "a|b", "ok", "x | y\nz " + "long " * 60)], 1.0)
    assert "| one | a\\|b | ok | x \\| y z long" in report.markdown()
    assert len(report.table().splitlines()) > 2
    assert json.loads(report.line())["results"][0]["case"] == "a|b"


# --- what the checks are made of ---


def test_one_other_bit_is_found() -> None:
    def outcome() -> dict[str, Any]:
        state = {"value of a": torch.ones(3), "value of b": torch.ones(2)}
        return {"steps": [[(1.5).hex(), (2.0).hex()]], "state": state}

    assert device_check_bits.differences([outcome(), outcome()], outcome()) == []
    other = outcome()
    other["steps"][0][1] = (2.0 + 2**-50).hex()
    other["state"]["value of a"][1] += 2**-23
    told = device_check_bits.differences([outcome(), other], outcome())
    assert told[0] == f"norm of step 1 on rank 1: {2.0 + 2**-50!r}, at one rank 2.0"
    assert told[1] == "value of a on rank 1 (1 elements, 1.19e-07 at most)"
    del other["state"]["value of b"]
    assert device_check_bits.differences([other], outcome())[-1] == "no rank has value of b"


def test_idle_time() -> None:
    found = device_check_runs.idle_of([(5000, 6000), (0, 2000), (2500, 4000), (3500, 4500)])
    assert found == {"share": 1000 / 6000, "median_us": 0.5, "overlap_us": 0.5, "count": 3.0, "whole_ms": 0.006}


def test_copies_are_measured_on_a_gpu_that_is_late() -> None:
    driver = LateDriver(3)
    device = StreamDevice(driver, True)
    for nbytes in (1, 1000, 4096, PART_BYTES + 12):
        assert device_check_copies.check_right_bytes(device, nbytes) == ""
    tensor = torch.zeros(4096, dtype=torch.uint8)
    turns = {
        "out": device_check_copies.out_turn(device, tensor, 3),
        "in": device_check_copies.in_turn(device, 4096, 3),
    }
    assert all(rate > 0 for rate in device_check_copies.rates_of(turns, 3 * 4096).values())
    assert set(device_check_runs.slots_of(device)) == {"receive into", "send from", "land in"}
    assert device_check_runs.slots_of(HostDevice()) == {}


def test_the_files_of_tests_load_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", device_check_there._pytest_stub())
    module = device_check_there._load(TOOLS.parent / "tests" / "gpu" / "test_cuda_device.py")
    taking_one = [
        name for name, value in vars(module).items() if name.startswith("test_") and value.__code__.co_argcount == 1
    ]
    assert "test_a_tensor_is_seen_without_a_copy" in taking_one


def test_a_ucx_is_found_in_a_folder(tmp_path: Path) -> None:
    library = tmp_path / "libucx" / "lib"
    library.mkdir(parents=True)
    assert device_check_there.find_ucx(str(tmp_path)) is None
    (library / "libucp.so.0").write_text("")
    assert device_check_there.find_ucx(str(tmp_path)) == library
    assert device_check_there.find_ucx(str(library)) == library
    assert device_check_there.ucx_environment(library, "MPICH Version: 5")["MPIR_CVAR_NOLOCAL"] == "1"
    assert device_check_there.ucx_environment(library, "Open MPI v5.0.11")["OMPI_MCA_pml"] == "ucx"


def test_wheels_are_unpacked_beside_each_other(tmp_path: Path) -> None:
    folder, prefix = tmp_path / "wheels", tmp_path / "prefix"
    folder.mkdir()
    with zipfile.ZipFile(folder / "absent_thing-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("absent_thing.py", "")
        archive.writestr("absent_thing-1.0.data/data/bin/mpirun", "#!/bin/sh\n")
        archive.writestr("absent_thing-1.0.data/data/lib/libmpi.so.12", "")
    with zipfile.ZipFile(folder / "numpy-9.9-py3-none-any.whl", "w") as archive:
        archive.writestr("numpy.py", "")
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    told = device_check_wheels.unpack(folder, prefix)
    assert told[0] == "absent_thing 1.0 unpacked"
    assert told[1].startswith("broken-1.0-py3-none-any.whl can't be unpacked")
    assert told[2] == "numpy 9.9 left out, it is installed here"
    assert (prefix / "site" / "absent_thing.py").exists()
    assert os.access(prefix / "bin" / "mpirun", os.X_OK)
    found = device_check_wheels.environment(prefix, {"PATH": "/bin", "PYTHONPATH": "/x"})
    assert found == {
        "PYTHONPATH": f"/x:{prefix / 'site'}",
        "PATH": f"/bin:{prefix / 'bin'}",
        "MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.12"),
    }


def test_last_words_leave_out_lines_of_rules() -> None:
    assert last_words("one\n\n=====\n two \n| three\n---\n") == "one / two / | three"
    assert last_words("") == "none"


def test_the_signals_of_a_code_are_named() -> None:
    assert device_check.code_text(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert device_check.code_text(-99) == "ended by signal 99"
    assert device_check.code_text(2) == "exit code 2"
