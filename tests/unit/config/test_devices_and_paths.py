"""``comm.device`` and ``comm.path``, and what the former gives on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpipipe.config import Config
from mpipipe.device import open_device
from mpipipe.errors import ConfigError, SetupError


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("")
    return path


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("path", ["auto", "staged", "cuda-aware"])
def test_devices_and_paths(run_file: Path, device: str, path: str) -> None:
    """Whether there is a GPU is found when it is opened; cuda-aware without one is test_contradictions.py's."""
    settings = [f"comm.device={device}", f"comm.path={path}"]
    if (device, path) != ("cpu", "cuda-aware"):
        comm = Config.load(run_file, settings).comm
        assert (comm.device, comm.path) == (device, path)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [("comm.device=gpu", '"auto", "cpu", "cuda"'), ("comm.path=direct", '"auto", "staged", "cuda-aware"')],
)
def test_unknown_device_or_path(run_file: Path, override: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(run_file, [override])
    assert str(caught.value).endswith(f"is not known (allowed: {allowed})")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_with_what_to_install(run_file: Path) -> None:
    device = Config.load(run_file, ["comm.device=cuda"]).comm.device
    with pytest.raises(SetupError, match=r'comm\.device = "cuda": .*comm\.device = "cpu"') as caught:
        open_device(device)
    assert caught.value.exit_code == 3
    if torch.version.cuda is None:
        assert "was built without CUDA: install torch" in str(caught.value)
    assert open_device(Config.load(run_file).comm.device).name == "cpu"
