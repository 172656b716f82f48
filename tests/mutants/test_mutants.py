"""Deliberate faults in the shipped code: each is caught, by checks that pass on the real code.

``pytest tests/mutants -s`` prints the table.
"""

from __future__ import annotations

import pytest
from checks import OWN, is_of_the_certificate, passes
from faults import MUTANTS
from patcher import applied

CHECKS = sorted({check for mutant in MUTANTS for check in mutant.checks})
# Faults that leave law and text alone: ends and reports, and what a coin in (0, 1) never shows.
BESIDE_THE_LAW = {
    "<= instead of <", "max_tokens is overshot", "max_tokens is undershot",
    "ids are not cut at a stop string", "logprobs of the block's first row",
    "a row of NaN becomes a token",
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_passes_on_the_shipped_code(check):
    assert passes(check)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_caught(mutant):
    with applied(mutant):
        caught = {check: not passes(check) for check in mutant.checks}
    print(f"\n{mutant.name:<50} {', '.join(check for check in caught if caught[check])}")
    assert all(caught.values()), caught


def test_the_certificate_alone_catches_what_touches_the_law():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    beside = {m.name for m in MUTANTS if not any(map(is_of_the_certificate, m.checks))}
    assert beside == BESIDE_THE_LAW
    assert {check for check in CHECKS if not is_of_the_certificate(check)} == OWN.keys() - {
        "replay"
    }
