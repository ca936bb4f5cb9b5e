"""How large a table the ``mpipipe schedule`` verbs simulate and print."""

from __future__ import annotations

from mpipipe.errors import ConfigError

_SIMULATED = 20_000_000
_MOST_ACTIONS = {
    "text": _SIMULATED, "png": _SIMULATED, "svg": _SIMULATED, "html": _SIMULATED, "chrome": _SIMULATED,
    "json": 5_000_000, "compare": _SIMULATED,
}  # fmt: skip
"""Most actions of a table in a form that needs its times; those of files of tables have no limit here. Pictures and
timelines refuse smaller ones, by themselves."""


def refuse_above(num_actions: int, form: str) -> None:
    """Raise ConfigError for a table of more actions than ``form`` takes: one of ``--format``, or "compare"."""
    most = _MOST_ACTIONS.get(form)
    if most is None or num_actions <= most:
        return
    doing = "to compare" if form == "compare" else f"as {form}"
    raise ConfigError(
        f"a table of {num_actions:,} actions takes minutes and gigabytes {doing}, at most {most:,} are taken",
        key="-m",
        allowed="a smaller -m, -p or -v; 'schedule show -o FILE.h5' writes it",
    )


def check_size(name: str, form: str, p: int | None, m: int | None, v: int | None) -> None:
    """As ``refuse_above``, for the schedule ``name`` and these numbers, before anything is built. Raises ScheduleError
    for an unknown name."""
    from mpipipe.schedule.exchange import is_file
    from mpipipe.schedule.registry import family_of

    if form in _MOST_ACTIONS and not is_file(name):
        refuse_above(2 * (p or 4) * (v or family_of(name)[0].default_chunks) * (m or 8), form)
