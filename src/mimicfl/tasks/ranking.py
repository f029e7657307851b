"""Scores of positive and negative targets that arrive in batches, and the area under their ROC curve."""

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_SCORES = 1 << 23  # scores that are kept; more of them are counted in bins
BINS = 1 << 16


@dataclass(frozen=True)
class Scores:
    """Scores of negative and positive targets, in groups that are each ranked on their own: a class against all others, or a label.

    Up to `MOST_SCORES` scores are kept as they are. More are counted in a histogram, so that memory stays bounded; which of the two
    depends on their number alone, not on the batches.
    """

    values: Tensor  # [n, groups] float64
    positive: Tensor  # bool [n, groups]
    counts: Tensor | None = None  # [groups, 2, bins]: instead of the values

    def __add__(self, other: "Scores") -> "Scores":
        if self.counts is None and other.counts is None:
            both = Scores(*(torch.cat([getattr(each, name) for each in (self, other)]) for name in ("values", "positive")))
            return both if both.values.numel() <= MOST_SCORES else both._binned()
        mine, theirs = self._binned(), other._binned()
        assert mine.counts is not None
        assert theirs.counts is not None
        return Scores(mine.values, mine.positive, mine.counts + theirs.counts)

    def cpu(self) -> "Scores":
        return Scores(self.values.cpu(), self.positive.cpu(), None if self.counts is None else self.counts.cpu())

    def _binned(self) -> "Scores":
        if self.counts is not None:
            return self
        groups = self.values.shape[1]
        first = 2 * BINS * torch.arange(groups, device=self.values.device)
        where = (first + BINS * self.positive.long() + _bins(self.values.float())).reshape(-1)
        counts = torch.zeros(groups * 2 * BINS, dtype=torch.float64, device=where.device)
        counts.index_add_(0, where, torch.ones_like(where, dtype=torch.float64))
        return Scores(self.values[:0], self.positive[:0], counts.view(groups, 2, BINS))

    def areas(self) -> list[float]:
        """The area of every group that has both positive and negative targets."""
        if self.counts is not None:
            groups = list(self.counts)
        else:
            groups = [_counts_by_value(*pair) for pair in zip(self.values.T, self.positive.T, strict=True)]
        return [float(area) for negative, positive in groups if (area := _area(negative, positive)) is not None]


def _counts_by_value(scores: Tensor, positive: Tensor) -> Tensor:
    """The numbers of negative and positive targets of each score, in the order of the scores, [2, different scores]."""
    different, which = scores.unique(return_inverse=True)
    counts = torch.zeros(2, len(different), dtype=torch.float64)
    return counts.index_put_((positive.long(), which), torch.ones(len(scores), dtype=torch.float64), accumulate=True)


def _area(negative: Tensor, positive: Tensor) -> Tensor | None:
    below = negative.cumsum(dim=0) - negative
    pairs = negative.sum() * positive.sum()
    return (positive * (below + negative / 2)).sum() / pairs if pairs else None


def _bins(scores: Tensor) -> Tensor:
    """The upper 16 bits of float32 scores as numbers in the order of the scores."""
    bits = scores.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    ordered = torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))
    return ordered >> 16
