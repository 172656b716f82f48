"""Runs the checks one after the other, within the minutes they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic

from ..api import encode_prompt, start
from ..engine import Round
from ..errors import RequestError
from ..load import Bundle
from ..options import Depth, Options, RuleName
from ..progress import progress
from ..sampler_config import SamplerConfig
from . import replay, tuples
from .cases import BLOCKS
from .certificate import Certificate, new_seed
from .engine_play import REQUESTS, request_distance
from .enumeration import total_variation
from .eprocess import EProcess
from .replay import Recorder

RULE_NAMES: tuple[RuleName, ...] = ("token", "block", "coupled")
PROMPTS = (
    "Name three rivers and say where they flow.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that counts the vowels in a string.",
    "Give five tips for learning a new language.",
    "Translate into French: The library is open from nine to five.",
    "What are the differences between a violin and a cello?",
    "Repeat this text: one red house, two green trees, three blue birds.",
)
_TUPLE_PROMPT = "The weather today is"
_TOKENS, _RECORDED = 64, 2
_DEPTHS: tuple[Depth, ...] = ("auto", 3, 1, 4, 2)
_TUPLES = 200
_APART = 10**6
# Shares of the time: replay must not use up what the bets need, and these leave some to chi-square.
_REPLAY_SHARE, _BETS_SHARE = 0.3, 0.8

Say = Callable[[float, str], None]


def certify(
    bundle: Bundle,
    *,
    rules: Sequence[RuleName] = RULE_NAMES,
    alpha: float = 1e-3,
    delta: float = 0.05,
    minutes: float = 15.0,
    prompts: Sequence[str] = PROMPTS,
    sampling: SamplerConfig | None = None,
    seed: int | None = None,
    say: Say = lambda share, what: None,
) -> Certificate:
    """Check enumeration, replay, bets, tuples and drift of a running engine.

    alpha: the chance that an exact engine is refuted, and that one whose law is off by ``delta``
    (total variation, towards the drafts) is certified.  minutes: for all; what is not decided by
    then is an open question.  seed: the first; drawn if None.  say: called with the share that is
    done and what comes.  Raises ``RequestError`` for parameters out of range or without prompts.
    """
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise RequestError("certify needs prompts, none of them empty")
    for rule in rules:
        if rule not in RULE_NAMES:
            raise RequestError(f"certify knows {', '.join(RULE_NAMES)}, not {rule!r}")
    if not rules or not 0 < alpha < 1 or not 0 < delta <= 0.5 or not minutes > 0:
        raise RequestError("certify needs a rule, alpha in (0, 1), delta in (0, 0.5], minutes > 0")
    begin, law = monotonic(), sampling or SamplerConfig()
    rules = tuple(dict.fromkeys(rules))
    found = Certificate(bundle, rules, alpha, delta, law, new_seed() if seed is None else seed)

    furthest = 0.0

    def ahead(share: float, what: str) -> None:  # wealth goes up and down, a bar does not
        nonlocal furthest
        furthest = max(furthest, share)
        say(furthest, what)

    def until(share: float) -> Callable[[], bool]:
        return lambda: monotonic() < begin + share * 60 * minutes

    with _timed(found, "enumeration"):
        _enumerate(found, ahead, until(1.0))
    if "coupled" in rules:
        with _timed(found, "seed_replay"):
            _replay(found, prompts, ahead, until(_REPLAY_SHARE))
    with _timed(found, "e_process"):
        for i, rule in enumerate(rules):
            now = (monotonic() - begin) / (60 * minutes)
            _bet(
                found,
                rule,
                prompts,
                ahead,
                until(now + max(0, _BETS_SHARE - now) / (len(rules) - i)),
            )
    with _timed(found, "chi_square"):
        for rule in rules:
            _tuples(found, rule, ahead, until(1.0))
    return found


def run(bundle: Bundle, **parameters: object) -> Certificate:
    """``certify`` with a progress bar on stderr."""
    with progress() as bar:
        task = bar.add_task("", total=100)

        def say(share: float, what: str) -> None:
            bar.update(task, completed=int(100 * share), description=what)

        done = certify(bundle, say=say, **parameters)  # type: ignore[arg-type]
        bar.update(task, completed=100)
    return done


@contextmanager
def _timed(found: Certificate, name: str) -> Iterator[None]:
    begin = monotonic()
    yield
    found.seconds[name] = monotonic() - begin


def _enumerate(found: Certificate, say: Say, on: Callable[[], bool]) -> None:
    """The joint laws of all cases, the engine's own among them."""
    for i, rule in enumerate(found.rules):
        laws: dict[str, float] = {}
        for case in BLOCKS:
            say(0.15 * (i + len(laws) / 40) / len(found.rules), f"enumeration, {rule}")
            laws[case] = total_variation(rule, BLOCKS[case])
        for name in REQUESTS:
            laws[f"engine: {name}"] = request_distance(rule, REQUESTS[name])
            if not on():
                return
        found.joint_laws[rule] = laws


def _replay(found: Certificate, prompts: Sequence[str], say: Say, on: Callable[[], bool]) -> None:
    pairs, done = len(replay.cases(prompts)), count()

    def before() -> bool:
        say(0.15 + 0.2 * next(done) / pairs, "seed replay")
        return on()

    found.replay = replay.run(found.bundle, prompts, first_seed=found.seed, before=before)


def _bet(
    found: Certificate, rule: RuleName, prompts: Sequence[str], say: Say, on: Callable[[], bool]
) -> None:
    """Stream outputs and bet on their tokens until it is decided; record some for the drift."""
    bets, outputs, tokens = EProcess(found.level, found.delta), 0, 0
    begun = 0.35 + 0.5 * found.rules.index(rule) / len(found.rules)
    while on() and bets.decision is None:
        ids = encode_prompt(found.bundle, prompts[outputs % len(prompts)])
        recorder = Recorder(ids) if outputs < _RECORDED else None

        def watch(done: Round, recorder: Recorder | None = recorder) -> None:
            bets.watch(done)
            if recorder is not None:
                recorder.watch(done)

        options = Options(
            found.sampling,
            _TOKENS,
            seed=_seed(found, rule, 1) + outputs,
            depth=_DEPTHS[outputs % len(_DEPTHS)],
            verify=rule,
        )
        for chunk in start(found.bundle, ids, options, on_round=watch):
            tokens += len(chunk.token_ids)
            say(begun + 0.5 / len(found.rules) * bets.progress, f"bets, {rule}")
            if bets.decision is not None or not on():
                break
        if recorder is not None:
            found.drift.add(found.bundle, recorder)
        outputs += 1
    found.bets[rule], found.outputs[rule], found.tokens[rule] = bets, outputs, tokens


def _seed(found: Certificate, rule: RuleName, part: int) -> int:
    """The first seed of a rule's outputs: no two outputs of a certificate share one."""
    return (found.seed + (3 * part + RULE_NAMES.index(rule)) * _APART) % 2**64


def _tuples(found: Certificate, rule: RuleName, say: Say, on: Callable[[], bool]) -> None:
    done, place = count(), found.rules.index(rule)

    def before() -> bool:
        say(0.85 + 0.15 * (place + next(done) / _TUPLES) / len(found.rules), f"tuples, {rule}")
        return on()

    test, shown = tuples.run(
        found.bundle, _TUPLE_PROMPT, rule, _TUPLES, seed=_seed(found, rule, 2), before=before
    )
    if test.runs:
        found.chi_square[rule], found.tuples[rule] = test, shown
