"""Schedules: which rank does what, in which order. Pure: a table is a function of p, v, m and costs; no MPI, no torch,
no device.

``build`` makes a table, ``verify`` checks it, ``simulate`` times it, ``lower`` puts its messages in, ``draw_text``,
``draw_png``, ``svg_text`` and ``html_text`` show it.
"""

from __future__ import annotations

from mpipipe.schedule.action import Action, Kind
from mpipipe.schedule.check import Problem, find_problems, verify
from mpipipe.schedule.costs import Costs, Disturbance, Hops
from mpipipe.schedule.critical_path import critical_path
from mpipipe.schedule.deadlock import BUFFERED, RENDEZVOUS, Sends, Wait, find_deadlock, receive_buffers_needed
from mpipipe.schedule.draw.html import Shown, html_text
from mpipipe.schedule.draw.png import draw_png
from mpipipe.schedule.draw.svg import svg_text
from mpipipe.schedule.draw.text import draw_text
from mpipipe.schedule.fewer import fewer_microbatches
from mpipipe.schedule.figures import figures
from mpipipe.schedule.forward_only import forward_only
from mpipipe.schedule.lower import lower, strip
from mpipipe.schedule.memory import MemoryCurve, memory_curve
from mpipipe.schedule.phases import Phase, action_phases, phase_bounds
from mpipipe.schedule.registry import build, names
from mpipipe.schedule.simulate import Simulation, simulate
from mpipipe.schedule.table import ScheduleTable

__all__ = [
    "BUFFERED",
    "RENDEZVOUS",
    "Action",
    "Costs",
    "Disturbance",
    "Hops",
    "Kind",
    "MemoryCurve",
    "Phase",
    "Problem",
    "ScheduleTable",
    "Sends",
    "Shown",
    "Simulation",
    "Wait",
    "action_phases",
    "build",
    "critical_path",
    "draw_png",
    "draw_text",
    "fewer_microbatches",
    "figures",
    "find_deadlock",
    "find_problems",
    "forward_only",
    "html_text",
    "lower",
    "memory_curve",
    "names",
    "phase_bounds",
    "receive_buffers_needed",
    "simulate",
    "strip",
    "svg_text",
    "verify",
]
