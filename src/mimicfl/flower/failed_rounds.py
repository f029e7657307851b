"""Detects runs that learn nothing: they must fail with the reasons, not finish."""

from collections import Counter
from typing import Any

from ..errors import UsageError
from ..text import counted


class NothingLearned(UsageError):
    """Too few updates could be aggregated in too many rounds."""


class FailedRounds:
    """Counts rounds in which fewer than `min_counted` updates were aggregated, although clients were selected.

    failed_rounds   this many of them in a row end the run; None: no limit
    """

    def __init__(self, min_counted: int, failed_rounds: int | None) -> None:
        self.min_counted, self.failed_rounds = min_counted, failed_rounds
        self.rounds, self.in_a_row, self.learned, self.asked = 0, 0, False, False
        self.reasons: Counter[str] = Counter()

    def note(self, row: dict[str, Any]) -> None:
        """Count a round. Raises `NothingLearned` if too many in a row have failed."""
        self._count(row)
        if self.failed_rounds is not None and self.in_a_row >= self.failed_rounds:
            raise NothingLearned(self._message(f"in {self.in_a_row} rounds in a row"))

    def restore(self, rows: list[dict[str, Any]]) -> None:
        """Count the rounds before a restart, which must not fail the run again: the user may have fixed the cause."""
        for row in rows:
            self._count(row)
        self.in_a_row = 0

    def check_end(self) -> None:
        """Raise `NothingLearned` if no round of the run was successful."""
        if self.learned or self.failed_rounds is None or not self.rounds:
            return
        if self.asked:
            raise NothingLearned(self._message("in the whole run"))
        raise NothingLearned(
            f"no client was selected in any of the {counted(self.rounds, 'round')}; check the availability (failed_rounds=None permits it)"
        )

    def _count(self, row: dict[str, Any]) -> None:
        self.rounds += 1
        if row["active"] >= self.min_counted:
            self.in_a_row, self.learned = 0, True
            self.reasons.clear()
        elif row["sent"] or row["failed"]:  # a round without selected clients, as under an availability pattern, has not failed
            self.in_a_row, self.asked = self.in_a_row + 1, True
            self.reasons.update(row["failed"].values())

    def _message(self, when: str) -> str:
        common = "; ".join(f"{why} ({count}x)" for why, count in self.reasons.most_common(3)) or "no reply"
        return (
            f"fewer than {self.min_counted} update(s) could be aggregated {when}: {common}. Completed rounds are saved if a folder is set: "
            "fix the cause and start again (failed_rounds sets after how many rounds to give up)"
        )
