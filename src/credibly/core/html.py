"""Small HTML tables for notebooks. All text is escaped; colours and fonts are the notebook's own."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

_LEFT = ' style="text-align: left"'


def fact_table(
    title: str,
    facts: Mapping[str, object] | None = None,
    *,
    head: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    note: str = "",
) -> str:
    """Return a title, a table of named facts, a grid with a head, and a note; each of the last three may be absent."""
    parts = [f"<strong>{html.escape(title)}</strong>"]
    if facts:
        lines = [
            f"<tr><th scope='row'{_LEFT}>{html.escape(name)}</th><td{_LEFT}>{html.escape(str(value))}</td></tr>"
            for name, value in facts.items()
        ]
        parts.append(f"<table>{''.join(lines)}</table>")
    body = [_grid_row(row) for row in rows]
    if body:
        cells = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in head)
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>")
    if note:
        parts.append(f"<p>{html.escape(note)}</p>")
    return f"<div>{''.join(parts)}</div>"


def _grid_row(row: Sequence[str]) -> str:
    first, *rest = (html.escape(cell) for cell in row)
    return f"<tr><th scope='row'{_LEFT}>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
