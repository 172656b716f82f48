"""The certificate: what was checked on this engine, what came of it, and the verdict."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import exp
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import head_file
from ..checkpoint import read_checkpoint
from ..environment import machine, versions
from ..load import Bundle
from ..options import RuleName
from ..provenance import known_sha256
from ..sampler_config import SamplerConfig
from .enumeration import EXACT
from .eprocess import EProcess
from .replay import Drift, Replay
from .tuples import ChiSquare

Verdict = Literal["certified", "refuted", "inconclusive"]
EXIT_CODES: dict[Verdict, int] = {"certified": 0, "refuted": 3, "inconclusive": 4}

# JSON has no infinity.
_MOST = 1e300


@dataclass
class Certificate:
    """The outcome of all checks; rule -> result where a check is made per rule.

    level: the error of each statistical test, alpha shared out among them (Bonferroni).
    joint_laws: rule -> case -> total variation.  tokens: emitted while bets were placed.
    """

    bundle: Bundle
    rules: Sequence[RuleName]
    alpha: float
    delta: float
    sampling: SamplerConfig
    seed: int
    level: float = 0.0
    joint_laws: dict[str, dict[str, float]] = field(default_factory=dict)
    replay: Replay = field(default_factory=Replay)
    bets: dict[str, EProcess] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    chi_square: dict[str, ChiSquare] = field(default_factory=dict)
    tuples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    drift: Drift = field(default_factory=Drift)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Share alpha out: a wealth and a chi-square a rule."""
        self.level = self.alpha / (2 * len(self.rules))

    @property
    def refuted_by(self) -> list[str]:
        """What shows that the engine is not exact, a line each."""
        found = [
            f"{rule} rule: the joint law of case {case!r} is off by {distance:.2g}"
            for rule, laws in self.joint_laws.items()
            for case, distance in laws.items()
            if distance > EXACT
        ]
        if self.replay.different:
            found.append(f"{self.replay.different} coupled outputs are not plain decoding's")
        for rule, bets in self.bets.items():
            if bets.decision == "refuted":
                found.append(f"{rule} rule: the emitted tokens lean towards the drafts' law")
        for rule, test in self.chi_square.items():
            if test.p_value < self.level:
                found.append(f"{rule} rule: chi-square of tuples, p = {test.p_value:.2g}")
        return found

    @property
    def open_questions(self) -> list[str]:
        """What was not decided, a line each."""
        found = [
            f"{rule} rule: no decision after {bets.tokens} bets"
            for rule, bets in self.bets.items()
            if bets.decision is None
        ]
        for name, done in (
            ("enumeration", self.joint_laws),
            ("bets", self.bets),
            ("chi-square", self.chi_square),
        ):
            found += [f"{rule} rule: no time for {name}" for rule in self.rules if rule not in done]
        if "coupled" in self.rules and not self.replay.runs:
            found.append("no time for seed replay")
        if self.replay.unexplained:
            found.append(f"{self.replay.unexplained} replays differ at the threshold of a filter")
        return found

    @property
    def verdict(self) -> Verdict:
        """Refuted by anything; certified if everything was decided; else inconclusive."""
        if self.refuted_by:
            return "refuted"
        return "inconclusive" if self.open_questions else "certified"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        laws = [distance for laws in self.joint_laws.values() for distance in laws.values()]
        return {
            "verdict": self.verdict,
            "refuted_by": self.refuted_by,
            "open_questions": self.open_questions,
            "alpha": self.alpha,
            "delta": self.delta,
            "level_of_each_test": self.level,
            "joint_law_tv": max(laws, default=None),
            "joint_laws": {
                rule: {"cases": len(laws), "tv": max(laws.values())}
                for rule, laws in self.joint_laws.items()
            },
            "seed_replay": asdict(self.replay),
            "e_process": self._bets(),
            "chi_square": {r: _finite(asdict(test)) for r, test in self.chi_square.items()},
            "drift": self.drift.to_dict(),
            "rules": list(self.rules),
            "law": asdict(self.sampling),
            "seed": self.seed,
            "model": _model(self.bundle),
            "device": str(mx.default_device()),
            "machine": machine(),
            "versions": versions(),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }

    def _bets(self) -> dict[str, Any]:
        """Sums and the extremes of all rules, then each rule's own."""
        processes = self.bets.values()
        return {
            "tokens": sum(bets.tokens for bets in processes),
            "wealth": max((_wealth(b.log_wealth) for b in processes), default=None),
            "wealth_against_leak": min((_wealth(-b.log_wealth) for b in processes), default=None),
            "alpha": self.level,
            "delta": self.delta,
            "rules": {
                rule: {
                    "decision": bets.decision,
                    "tokens": bets.tokens,
                    "emitted": self.tokens[rule],
                    "outputs": self.outputs[rule],
                    "nearly_equal_laws": bets.close,
                    "impossible_tokens": bets.impossible,
                    "wealth": _wealth(bets.log_wealth),
                    "wealth_against_leak": _wealth(-bets.log_wealth),
                }
                for rule, bets in self.bets.items()
            },
        }


def _wealth(log_wealth: float) -> float:
    return min(exp(min(log_wealth, 700.0)), _MOST)


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    return {k: min(v, _MOST) if isinstance(v, float) else v for k, v in figures.items()}


def _model(bundle: Bundle) -> dict[str, Any]:
    provenance = bundle.provenance
    head, files = None, dict(provenance.sha256)
    if bundle.head is not None:
        hashed = None
        if bundle.head_source == "model":  # in the model's own files, or in some beside them
            beside = read_checkpoint(provenance.path).sidecar.values()
            files |= {f.name: known_sha256(f) for f in sorted({t.file for t in beside})}
        elif bundle.head_source not in (None, "given"):
            hashed = known_sha256(Path(bundle.head_source) / head_file.WEIGHTS)
        head = {"source": bundle.head_source, "sha256": hashed}
    return {
        "source": provenance.source,
        "architecture": provenance.architecture,
        "quantisation": provenance.quantisation,
        "runs": provenance.runs,
        "sha256": files,
        "head": head,
    }


def new_seed() -> int:
    """A seed from which those of all outputs count up."""
    return secrets.randbits(40)
