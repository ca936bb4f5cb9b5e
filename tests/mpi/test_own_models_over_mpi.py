"""A script of docs/own_models.md, as it stands, on ranks that mpirun starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import REPOSITORY, launch

pytestmark = pytest.mark.mpi


def test_the_script_with_a_mask_gives_the_numbers_of_one_rank(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "own_models.md").read_text(encoding="utf-8")
    (run_file,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (script,) = re.findall(r"^`packed\.py`.*?^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed = []
    for p in (1, 2, 3):
        folder = tmp_path / str(p)
        folder.mkdir()
        (folder / "own.toml").write_text(run_file, encoding="utf-8")
        (folder / "packed.py").write_text(script, encoding="utf-8")
        ended = launch(p, "packed.py", cwd=folder, timeout=120)
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout)
    assert printed[0].startswith("0 60 ")
    assert printed == [printed[0]] * 3
