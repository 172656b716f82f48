"""What a head is worth: acceptance, and speed against plain decoding (AR), on given prompts.

The ways to decode run side by side in one process, prompt by prompt, and their order is turned
round every time. Sampling is top-p 0.95 and top-k 20; prompt i has the seed i. Acceptance is that
of the token rule: under it the texts of the ways differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from .api import Generation, Stream, start
from .drafters import MTPDrafter
from .environment import machine, versions
from .heldout import spread
from .load import Bundle
from .metrics import Stats
from .mtp_patch import AttachedHead
from .options import Depth, DraftSource, Options, RuleName
from .sampler_config import SamplerConfig

TEMPERATURES = (0.0, 0.6, 1.0)
TOKENS = 64
_K = 3
_OVERHEAD_PROMPTS = 4


@dataclass(frozen=True)
class Way:
    """A way to decode: the model, where drafts come from, and how many of them a round."""

    bundle: Bundle
    draft: DraftSource
    depth: Depth

    def start(
        self,
        prompt: str,
        sampling: SamplerConfig,
        *,
        seed: int = 0,
        tokens: int = TOKENS,
        rule: RuleName = "token",
    ) -> Stream:
        """A stream of at most so many tokens."""
        return start(
            self.bundle,
            prompt,
            Options(sampling, tokens, seed=seed, draft=self.draft, depth=self.depth, verify=rule),
        )


@dataclass
class Measurement:
    """Figures of a head.

    by_temperature: "0", "0.6", ... -> acceptance by position and acceptance length with 3 drafts a
    round from the head; tokens/s and speed (tokens/s over AR's) with source and depth "auto".
    prompts: how many of each name, and ``tokens_each``.  outputs: temperature -> way -> outputs.
    """

    figures: dict[str, float | None]
    by_temperature: dict[str, dict[str, Any]]
    command: str
    machine: dict[str, str] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    prompts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outputs: dict[float, dict[str, list[Generation]]] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, without the outputs."""
        return {name: value for name, value in vars(self).items() if name != "outputs"}


def summed(outputs: Sequence[Generation]) -> Stats:
    """The counters of several outputs of one way, added up."""
    parts = [vars(output.stats) for output in outputs]
    first = outputs[0].stats
    total = Stats(first.drafter, first.rule, first.depth)
    for name in ("tokens", "rounds", "emitted", "head_drafted", "head_kept"):
        setattr(total, name, sum(part[name] for part in parts))
    for name in ("draft_seconds", "forward_seconds", "other_seconds"):
        setattr(total, name, sum(part[name] for part in parts))
    for name in ("drafted", "accepted"):
        columns = zip_longest(*(part[name] for part in parts), fillvalue=0)
        setattr(total, name, [sum(column) for column in columns])
    return total


def side_by_side(
    ways: Mapping[str, Way],
    prompts: Sequence[str],
    sampling: SamplerConfig,
    *,
    tokens: int = TOKENS,
    rule: RuleName = "token",
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[Generation]]:
    """Every prompt in every way; ``before`` is called before each output."""
    found: dict[str, list[Generation]] = {name: [] for name in ways}
    order = list(ways)
    for seed, prompt in enumerate(prompts):
        for name in order:
            before()
            stream = ways[name].start(prompt, sampling, seed=seed, tokens=tokens, rule=rule)
            found[name].append(stream.result())
        order.reverse()
    return found


def outputs_of(prompts: int, temperatures: int = len(TEMPERATURES)) -> int:
    """How many outputs ``measure`` makes."""
    return 3 * prompts * temperatures + min(prompts, _OVERHEAD_PROMPTS)


def measure(
    bundle: Bundle,
    prompts: Mapping[str, Sequence[str]],
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    tokens: int = TOKENS,
    command: str = "",
    before: Callable[[str], None] = lambda running: None,
) -> Measurement:
    """Measure the head of a bundle on prompts by name.

    before: called before each output with what is being measured. Raises ``RequestError`` for a
    model without a head.
    """
    ways = {
        "k3": Way(bundle, "mtp", _K),
        "auto": Way(bundle, "auto", "auto"),
        "ar": Way(bundle, "none", 0),
    }
    texts = [text for group in prompts.values() for text in group]
    for way in ways.values():  # the first forwards of a process are slower than all others
        way.start(texts[0], SamplerConfig(), tokens=min(8, tokens)).result()
    result = Measurement({}, {}, command)
    for temperature in temperatures:
        sampling = SamplerConfig(temperature=temperature, top_p=0.95, top_k=20)
        found = side_by_side(
            ways, texts, sampling, tokens=tokens, before=partial(before, f"T = {temperature:g}")
        )
        result.outputs[temperature] = found
        _enter(result, temperature, found)
    few = spread(texts, _OVERHEAD_PROMPTS)
    result.figures["round_overhead"] = _round_overhead(ways["auto"], few, tokens, before)
    result.prompts = {name: len(group) for name, group in prompts.items()} | {"tokens_each": tokens}
    costs = found["auto"][0].stats.costs or {}
    result.notes.append(
        f"token rule, top-p 0.95, top-k 20, prompt i with seed i; acceptance: draft mtp, {_K} a"
        " round, the head's copy bonus included; tokens/s and speed: draft auto, depth auto by"
        f" {costs.get('from')} costs; verification_cost: the share of auto's decoding that"
        f" everything between verify logits and emitted tokens takes; {bundle.provenance.runs}"
    )
    return result


def label(letter: str, value: float) -> str:
    """A parameter's value as part of a figure's name: t06."""
    return f"{letter}{value:g}".replace(".", "")


def _enter(result: Measurement, temperature: float, found: dict[str, list[Generation]]) -> None:
    fixed, auto, plain = (summed(found[name]) for name in ("k3", "auto", "ar"))
    acceptance, at = fixed.acceptance_by_position, label("t", temperature)
    speed = auto.tokens_per_second / plain.tokens_per_second
    if fixed.head_doubt:
        result.notes.append(f"T = {temperature:g}: {fixed.head_doubt}")
    result.by_temperature[f"{temperature:g}"] = {
        "acceptance": acceptance,
        "acceptance_length": fixed.acceptance_length,
        "tokens_per_second": auto.tokens_per_second,
        "ar_tokens_per_second": plain.tokens_per_second,
        "speed": speed,
    }
    for i in range(_K):
        known = i < len(acceptance)
        result.figures[f"acceptance_{i + 1}_{at}"] = acceptance[i] if known else None
    result.figures |= {
        f"accept_len_k3_{at}": fixed.acceptance_length,
        f"speed_vs_ar_{at}": speed,
        f"speed_k3_vs_ar_{at}": fixed.tokens_per_second / plain.tokens_per_second,
        f"tokens_per_second_{at}": auto.tokens_per_second,
        f"ar_tokens_per_second_{at}": plain.tokens_per_second,
        f"verification_cost_{at}": auto.other_seconds / auto.decode_seconds,
    }


class _TimedHead:
    """An attached head, of whatever kind, whose every forward is computed at once, and timed."""

    def __init__(self, attached: AttachedHead):
        self._attached = attached
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attached, name)

    def forward(self, state: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """As the head's."""
        return self._timed(self._attached.forward, state, tokens, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """As the head's."""
        return self._timed(self._attached.logits, hidden)

    def _timed(self, call: Callable[..., mx.array], *arguments: Any) -> mx.array:
        begin = perf_counter()
        out = call(*arguments)
        mx.eval(out)
        self.seconds += perf_counter() - begin
        return out


def _round_overhead(
    way: Way, prompts: Sequence[str], tokens: int, before: Callable[[str], None]
) -> float:
    """The share of decoding at T = 0.6 that the forwards of trunk and head do not take.

    The first round is left out: in it the head runs over the prompt.
    """
    inside = total = 0.0
    for seed, prompt in enumerate(prompts):
        before("round overhead")
        stream = way.start(prompt, SamplerConfig(temperature=0.6), seed=seed, tokens=tokens)
        mtp = getattr(stream.sequence.drafter, "mtp", stream.sequence.drafter)
        assert isinstance(mtp, MTPDrafter)
        head = _TimedHead(mtp.attached)
        mtp.attached = cast(AttachedHead, head)
        stats, rounds = stream.sequence.stats, iter(stream)
        next(rounds)
        inside -= stats.forward_seconds + head.seconds
        total -= stats.decode_seconds
        for _ in rounds:
            pass
        inside += stats.forward_seconds + head.seconds
        total += stats.decode_seconds
    return 1.0 - inside / total
