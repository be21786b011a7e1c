# SPDX-License-Identifier: Apache-2.0
"""Names for rows: what a table or a panel says once above, and what tells its lines apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kda_cupy.bench.record import Row

#: Fields that can tell two rows apart, and how they are said.
FIELDS: Final = {
    "op": "{}", "H": "H={}", "HV": "HV={}", "K": "K={}", "V": "V={}", "t": "t={}", "accept": "n={}",
    "mode": "{}", "B": "N={}", "dtype": "{}", "gate": "{} gate", "norm": "", "form": "{}",
    "plain_windows": "plain windows", "peer": "{}",
}  # fmt: skip


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows that belong together, in the order in which each group appears first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def title_of(row: Row) -> str:
    """Operation and geometry: what the rows of one full table have in common."""
    work = "packed decode" if row.operation == "decode" else row.table
    mode = f" with {row.mode}" if row.mode else ""
    dims = "" if row.mode else f"K={row.K}, V={row.V}, "
    norm = ", output norm" if row.norm and not row.form else ""
    windows = ", plain windows" if row.plain_windows else ""
    return f"{row.op} {work}{mode}: H={row.H}, HV={row.HV}, {dims}{row.dtype}, {row.gate} gate{norm}{windows}"


def names_of(row: Row) -> str:
    """What tells a row from the others of its table."""
    t = f"t={row.t}, " if row.mode else f"{row.form}, " if row.form else ""
    n = f"n={row.accept}, " if row.accept else ""
    peer = f"{row.peer}, " if row.peer else ""
    return f"{peer}{t}{n}{'N' if row.mode else 'B'}={row.B}"


def series(rows: list[Row], along: str) -> tuple[str, dict[str, list[Row]]]:
    """What all rows have in common, and the rows by what makes them different, in the order of a field.

    ``along`` is that field, ``"B"`` or ``"t"``; it names nothing, nor does what follows from it. What follows from
    other fields that are named is left out as well (a gate, if there is one for each H).
    """
    follows = {"t": ("t", "accept"), "B": ("B",)}[along]
    fields = [name for name in FIELDS if name not in follows]
    varying = [name for name in fields if len({getattr(row, name) for row in rows}) > 1]
    common = [name for name in fields if name not in varying]
    for name in ("norm", "gate", "dtype", "K", "V"):
        others = [each for each in varying if each != name]
        if name in varying and len(grouped(rows, _key(others))) == len(grouped(rows, _key(varying))):
            varying = others
    geometry = _key([name for name in fields if name not in ("t", "accept", "mode", "B")])
    places = {each: place for place, each in enumerate(grouped(rows, geometry))}
    last = ("B", "t") if along == "t" else ("t", "accept", "B")
    in_order = sorted(rows, key=lambda row: (places[geometry(row)], row.mode, _key(last)(row)))
    lines = grouped(in_order, lambda row: words(row, varying, always=True))
    ordered = {label: sorted(each, key=lambda row: getattr(row, along)) for label, each in lines.items()}
    return words(rows[0], common), ordered


def _key(names: Iterable[str]) -> Callable[[Row], Any]:
    return lambda row: tuple([getattr(row, name) for name in names])


def words(row: Row, names: Iterable[str], *, always: bool = False) -> str:
    """Values of some fields. What goes without saying is left out, unless it is ``always`` wanted."""
    return " ".join(filter(None, (_word(row, name, always=always) for name in names)))


def _word(row: Row, name: str, *, always: bool) -> str:
    value = getattr(row, name)
    if name == "norm":
        if row.form:
            return ""  # which says it
        return "with output norm" if value else "no norm" if always else ""
    if name == "peer":
        return value or ("kda_cupy" if always else "")
    if name == "HV":
        return f"HV={value}" if value != row.H else ""
    if name in "KV" and value == 128 and not always:
        return ""
    return FIELDS[name].format(value) if value and (row.mode or name != "t") else ""
