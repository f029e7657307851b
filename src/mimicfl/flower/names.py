"""Order of client ids."""

import re


def natural_key(client: str) -> list[tuple[int, int, str]]:
    """Sort key for client ids: client 10 follows client 9."""
    parts = [part for part in re.split(r"([0-9]+)", client) if part]
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]
