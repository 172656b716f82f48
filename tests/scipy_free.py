"""A chi-square test without SciPy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping


def chi_square_p(
    samples: Mapping[Hashable, int], law: Mapping[Hashable, float], *, least: float = 8.0
) -> float:
    """The p-value of counts against a law; cells expecting fewer than ``least`` are merged."""
    total = sum(samples.values())
    cells, rest_seen, rest_expected = [], 0.0, 0.0
    for outcome, chance in law.items():
        seen, expected = samples.get(outcome, 0), chance * total
        if expected < least:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
        else:
            cells.append((seen, expected))
    if rest_expected >= 1.0:
        cells.append((rest_seen, rest_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return upper_tail(statistic, len(cells) - 1)


def upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees of freedom > statistic), Wilson and Hilferty 1931."""
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
