"""Recording what a rank did and when, for the trace file of the run."""

from mpipipe.trace.recorder import Recorder

__all__ = ["Recorder"]
