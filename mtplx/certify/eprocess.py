"""The sequential test on a running engine: does what it emits follow p, or lean towards q?

Two hypotheses about every emitted token on which a bet is placed:

* exact: it follows p;
* leak: it follows (1 - l) p + l q, l = delta / TV(p, q): the law is off by delta, in total
  variation, towards the law of the drafts.

The wealth W = prod ((1 - l) p(y) + l q(y)) / p(y) bets on the leak. Under the exact law its
expectation never grows, so by Ville's inequality W >= 1/alpha ever happens with probability at
most alpha: then the exact law is rejected, *refuted*. 1/W is the same against the leak: at
1/W >= 1/alpha the leak is rejected, *certified*. The test may stop at any time; it stops when
either decides.
(Waudby-Smith, Ramdas 2024, arXiv 2010.09686, on betting; Ramdas et al. 2023, arXiv 2210.01948.)

**Which tokens.** In a round with drafts x1..xK of laws q_1..q_K, emitted y1..ym, a bet is placed on
y_(i+1), between p_(i+1) and q_(i+1), iff i < K and x1..xi = y1..yi (``bets_of``). There is none on
the bonus token, where no q is, nor behind the first draft that was not emitted, where q belongs to
another text; and the draft at the very position that is bet on is never looked at.

**Why W is a martingale under the exact law.** Let F be what is known before y_(i+1): the earlier
rounds, and y1..yi and whether x1..xi = y1..yi in this one. These F grow from token to token, and
p_(i+1), q_(i+1) and whether there is a bet are functions of F: a drafter decides to place draft
i + 1 before it draws it. What remains is that y_(i+1) follows p_(i+1) given F, if x1..xi are kept:

* token: draft i + 1, its coin and its residual have keys of their own, independent of F. The one
  step is speculative sampling, whose outcome follows p.
* coupled: y_(i+1) is decided by RACE noise of its position. F is a function of the noise of earlier
  positions: a drafter is told of judged drafts only, which stand where a token has been emitted.
* block: with tau the number kept, P(tau >= i | x1..xi) = P_i. So given x1..xi and tau >= i, the
  chance of y at i + 1 is 1/P_i times [q(y) min(1, P_i p(y)/q(y)), if draft i + 1 is y and is kept,
  plus (P_i p(y) - q(y))+, if the block ends at i], and that is p(y).

And x1..xi = y1..yi iff all i were kept: at a first draft that is not kept, no rule emits that draft
(the residual has no mass there). Behind the round's end the next one has fresh keys, or, coupled,
positions of its own. Betting on tokens chosen by whether *their* draft was kept would bias W: a
kept draft follows min(p, q), not p.

**The composite leak.** 1/W is a supermartingale also if every leak is larger than l: of the
expectation of p / ((1 - l) p + l q) under (1 - k) p + k q, the derivative in k is
sum (q - p) p / ((1 - l) p + l q) <= 0, since where q/p is large the other factor is small. So
"certified" rejects every leak of at least delta wherever a bet was placed.

**Where the laws nearly agree.** Nothing can leak delta towards q if TV(p, q) < delta; near to it l
is close to 1, and a single token that q cannot give would all but decide. Bets are placed where
l <= 1/2, that is TV(p, q) >= 2 delta: then no token certifies by more than a factor of 2. A token
that p cannot give makes W infinite, at any l.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, log, log1p
from typing import Literal

from ..distribution import Distribution, _probability, excess
from ..engine import Round

Bet = tuple[Distribution, Distribution, int]
Decision = Literal["certified", "refuted"]

# The largest share of q in the leak.
LARGEST = 0.5


def bets_of(done: Round) -> Iterator[Bet]:
    """(p, q, emitted token) of every token of a round that may be bet on, in order."""
    drafts = zip(done.draft.tokens, done.draft.q_rows, strict=True)
    for i, (token, (drafted, q)) in enumerate(zip(done.emitted, drafts, strict=False)):
        yield done.p_rows[i], q, token
        if token != drafted:
            return


@dataclass
class EProcess:
    """The wealth of both bets; see the module.

    alpha: the error of either decision, in (0, 1).  delta: the total variation that is looked for,
    in (0, 1/2].  tokens: bets placed.  close: no bet, since TV(p, q) < 2 delta.  impossible: bets
    on tokens with p = 0.  log_wealth: log W; 1/W is its negative.  path: log W after each bet.
    """

    alpha: float = 1e-3
    delta: float = 0.05
    tokens: int = 0
    close: int = 0
    impossible: int = 0
    log_wealth: float = 0.0
    path: list[float] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Check both parameters."""
        if not 0.0 < self.alpha < 1.0 or not 0.0 < self.delta <= LARGEST:
            raise ValueError(f"alpha must be in (0, 1), delta in (0, {LARGEST}]")

    @property
    def decision(self) -> Decision | None:
        """What has been decided; None while neither bet has won."""
        if self.log_wealth >= -log(self.alpha):
            return "refuted"
        return "certified" if self.log_wealth <= log(self.alpha) else None

    @property
    def progress(self) -> float:
        """How far the wealth has got towards the nearer decision, in [0, 1]."""
        return min(abs(self.log_wealth) / -log(self.alpha), 1.0)

    def bet(self, p: Distribution, q: Distribution, token: int) -> None:
        """Bet on a token that was emitted; without effect once a decision has been made."""
        if self.decision is not None:
            return
        distance = float(excess(p, q)[1].sum())
        if distance * LARGEST < self.delta:
            self.close += 1
            return
        self.tokens += 1
        share = self.delta / distance
        at_p, at_q = _probability(p, token), _probability(q, token)
        if at_p > 0.0:
            self.log_wealth += log1p(share * (at_q / at_p - 1.0))
        else:
            self.impossible += 1
            self.log_wealth = inf
        self.path.append(self.log_wealth)

    def watch(self, done: Round) -> None:
        """Bet on what a round emitted: an ``on_round`` of the engine."""
        for p, q, token in bets_of(done):
            self.bet(p, q, token)
