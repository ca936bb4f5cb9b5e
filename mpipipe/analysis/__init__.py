"""Looking at traces afterwards: bubble, waits, pictures. Needs numpy and h5py only; matplotlib is loaded when something
is drawn."""

from mpipipe.analysis.load import RankTrace, Segment, load_segment
from mpipipe.analysis.report import report
from mpipipe.analysis.summary import summary

__all__ = ["RankTrace", "Segment", "load_segment", "report", "summary"]
