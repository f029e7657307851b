"""Which client is which in the rows of a federation: `clients` counts clients as they joined, `answered` holds their ids, sorted."""

from collections.abc import Sequence

from .rows import Row


def by_id(rows: list[Row], num_clients: int) -> list[Row]:
    """The rows with the ids as client numbers, if all ids are numbers from 0 to N - 1; otherwise the rows as they are."""
    known = {str(number) for number in range(num_clients)}
    if not all(isinstance(row.get("answered"), list) and len(row["answered"]) == row["active"] for row in rows):
        return rows  # simulated, or damaged
    if not all(isinstance(client, str) and client in known for row in rows for client in row["answered"]):
        return rows
    return [row | {"clients": sorted(set(map(int, row["answered"])))} for row in rows]


def counted_as_joined(rows: Sequence[Row]) -> bool:
    """Whether the client numbers of these rows say only in which order the clients joined."""
    return any(row["answered"] != [str(client) for client in row["clients"]] for row in rows if "answered" in row)
