#!/usr/bin/env python3
"""How long ``mpipipe --help`` takes as a whole process, beside Python's own start.

    python tools/bench_start.py [--rounds 20]

The two alternate; medians. One line of JSON at the end: seconds, and the ratio to a bare start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the start of the command line.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    bare, help_text = [], []
    for _ in range(rounds):
        bare.append(seconds(["-c", "pass"]))
        help_text.append(seconds(["-m", "mpipipe", "--help"]))
    figures = {"python_s": statistics.median(bare), "help_s": statistics.median(help_text)}
    figures |= {"help_min_s": min(help_text), "ratio": figures["help_s"] / figures["python_s"]}
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
