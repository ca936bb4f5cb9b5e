"""A process killed in the midst of saving: what is found afterwards is a whole checkpoint, the last that was reported
or a newer one.
"""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

from mpipipe.checkpoint import CheckpointState, find_latest, load, prune, save
from mpipipe.transport import run_ranks

SAVES_FOR_EVER = """
import sys
import numpy as np
from mpipipe.checkpoint import CheckpointState, save
from mpipipe.transport import run_ranks

def work(transport):
    rank = transport.rank
    tensors = {f"/parameters/h.{rank}": np.full(200_000, step + rank, np.float32)}
    save(transport, sys.argv[1], step, CheckpointState(tensors, {"sample": 8 * step}, {}, ""))

step = int(sys.argv[2])
while True:
    step += 1
    run_ranks(2, work)
    print(step, flush=True)
"""


def test_what_a_kill_leaves_is_whole(tmp_path):
    generator = random.Random(5)
    step = 0
    for _ in range(3):
        command = [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
            reported = int(process.stdout.readline())
            time.sleep(generator.uniform(0.0, 0.03))
            process.send_signal(signal.SIGKILL)
            reported = int((process.stdout.read().split() or [reported])[-1])
        latest, skipped = find_latest(tmp_path, verify=True)
        assert all("a save that did not end" in text for text in skipped)
        loaded = load(latest, ["/parameters/h.0", "/parameters/h.1"])
        step = loaded.step
        assert step >= reported
        assert loaded.scalars == {"sample": 8 * step}
        for rank in range(2):
            assert np.array_equal(loaded.tensors[f"/parameters/h.{rank}"], np.full(200_000, step + rank, np.float32))
    run_ranks(1, lambda t: save(t, tmp_path, step + 1, CheckpointState({"/a": np.zeros(1)}, {}, {}, "")))
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
        for file in path.iterdir():
            os.utime(file, (0, 0))
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step + 1:08d}"]
