"""A table as text: its title, and rows in aligned columns. Pure."""

from __future__ import annotations

from rankdump.diff.api_tables import ApiTable

_GAP = "  "


def printed(title: str, table: ApiTable) -> str:
    """Return a table as it stands on a terminal, with an empty line behind it.

    A cell of several lines makes its row as high.
    """
    rows = [[cell.split("\n") for cell in row] for row in (table.titles, *table.rows)]
    widths = [
        max(len(line) for row in rows for line in row[column])
        for column in range(len(table.titles))
    ]
    lines = [title]
    for row in rows:
        for height in range(max(map(len, row))):
            cells = [cell[height] if height < len(cell) else "" for cell in row]
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines) + "\n\n"
