"""``mpipipe train`` on ranks of which some can't import mpi4py: ``without_mpi4py.py RANKS RUN_FILE MARKER``."""

from __future__ import annotations

import sys

from mpipipe.cli import main
from mpipipe.environment import launcher

if str(launcher().rank) in sys.argv[1].split(","):
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
sys.argv[1:] = ["train", sys.argv[2]]
sys.exit(main())
