"""n-gram drafts on copy-heavy prompts against plain decoding, and plain decoding against mlx-lm.

Every prompt asks to quote, correct or reformat a given text. With drafts and without run in turn
under one seed and the coupled rule, so both emit the same tokens. An output that repeats itself
would flatter the drafts: the share of 4-grams that occurred earlier in the same output is measured,
and an output above ``MAX_REPEATED`` is left out of the speed and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from ..agreement import difference
from ..api import Generation, encode_prompt, stream
from ..errors import MtplxError
from ..load import Bundle
from ..options import DraftSource
from ..progress import steps
from ..sampler_config import SamplerConfig
from .prompts import COPY_PROMPTS
from .report import Report

MAX_TOKENS = 96
MAX_REPEATED = 0.2
_SEED = 1
_AR_TOKENS = 24
_AR_REPEATS = 10
_PLAIN = {
    "t0": SamplerConfig(temperature=0.0),
    "t06": SamplerConfig(temperature=0.6),
    "t1_unfiltered": SamplerConfig(temperature=1.0, top_p=1.0, top_k=0),
}


@dataclass
class Tally:
    """Sums over the prompts of one temperature that count."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    repeated: list[float] = field(default_factory=list)
    identical: int = 0

    def ratio(self) -> float | None:
        """Tokens/s with drafts over tokens/s without."""
        if not self.tokens:
            return None
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


def repeated_share(ids: list[int]) -> float:
    """The share of 4-grams of an output that occurred earlier in it; 0 if it is shorter."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1.0 - len(Counter(grams)) / len(grams) if grams else 0.0


def run(bundle: Bundle) -> Report:
    """Both temperatures, then plain decoding against mlx-lm."""
    figures: dict[str, float | None] = {}
    notes: list[str] = []
    with steps(2 * len(COPY_PROMPTS) + len(_PLAIN)) as step:
        _decode(bundle, COPY_PROMPTS[0], 0.0, "ngram", 16)
        for label, temperature in (("t0", 0.0), ("t06", 0.6)):
            tally = compare(bundle, temperature, "ngram", notes, lambda: step("prompts"))
            figures[f"speed_vs_ar_copy_{label}"] = tally.ratio()
            figures[f"accept_len_copy_{label}"] = tally.tokens / max(tally.rounds, 1)
            figures[f"repeated_4grams_{label}"] = float(np.mean(tally.repeated))
            figures[f"prompts_counted_{label}"] = len(tally.repeated) - _left_out(tally)
            figures[f"identical_outputs_{label}"] = tally.identical / len(COPY_PROMPTS)
        for label, sampling in _PLAIN.items():
            step("plain decoding")
            figures[f"ar_vs_mlx_lm_{label}"] = _plain_against_mlx_lm(bundle, sampling)
    return Report("copy", figures, notes=notes)


def _left_out(tally: Tally) -> int:
    return sum(share > MAX_REPEATED for share in tally.repeated)


def _decode(
    bundle: Bundle, prompt: str, temperature: float, draft: DraftSource, max_tokens: int
) -> Generation:
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": _SEED, "draft": draft}
    return stream(
        bundle, prompt, sampling=SamplerConfig(temperature=temperature), **options
    ).result()


def compare(
    bundle: Bundle,
    temperature: float,
    draft: DraftSource,
    notes: list[str],
    before: Callable[[], None],
) -> Tally:
    """Every prompt with and without drafts, the order alternating from prompt to prompt."""
    tally, sampling = Tally(), SamplerConfig(temperature=temperature)
    order: list[DraftSource] = [draft, "none"]
    for number, prompt in enumerate(COPY_PROMPTS, 1):
        before()
        done = {name: _decode(bundle, prompt, temperature, name, MAX_TOKENS) for name in order}
        order.reverse()
        drafted, plain = done[draft], done["none"]
        found = difference(
            bundle,
            encode_prompt(bundle, prompt),
            drafted.token_ids,
            plain.token_ids,
            sampling=sampling,
            seed=_SEED,
        )
        tally.identical += found is None
        where = f"copy prompt {number}, T = {temperature}"
        if found is not None:
            notes.append(f"{where}: {found}")
        share = repeated_share(plain.token_ids)
        tally.repeated.append(share)
        if share > MAX_REPEATED:
            notes.append(f"{where}: left out, {share:.0%} repeated 4-grams")
            continue
        tally.tokens += drafted.stats.tokens
        tally.rounds += drafted.stats.rounds
        tally.seconds += drafted.stats.decode_seconds
        tally.plain_tokens += plain.stats.tokens
        tally.plain_seconds += plain.stats.decode_seconds
    return tally


def _plain_against_mlx_lm(bundle: Bundle, sampling: SamplerConfig) -> float:
    """Seconds a token of mlx-lm's generate_step over ours, same weights, prompt, BLAS and law.

    Both are timed from the first token to the last, the prompt excluded; medians over runs that
    take turns, in alternating order.
    """
    prompt = encode_prompt(bundle, "Write a story about a river and the people who live along it.")
    ours: list[float] = []
    theirs: list[float] = []
    sides = [(ours, _our_seconds), (theirs, _mlx_lm_seconds)]
    for _ in range(_AR_REPEATS):
        for seconds, measure in sides:
            seconds.append(measure(bundle, prompt, sampling))
        sides.reverse()
    return median(theirs) / median(ours)


def _our_seconds(bundle: Bundle, prompt: list[int], sampling: SamplerConfig) -> float:
    options: dict[str, Any] = {"max_tokens": _AR_TOKENS, "seed": _SEED, "draft": "none"}
    return _a_token([perf_counter() for _ in stream(bundle, prompt, sampling=sampling, **options)])


def _mlx_lm_seconds(bundle: Bundle, prompt: list[int], sampling: SamplerConfig) -> float:
    sampler = make_sampler(sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    steps = generate_step(mx.array(prompt), bundle.trunk, max_tokens=_AR_TOKENS, sampler=sampler)
    times = []
    for token, _ in steps:
        if int(token) in bundle.tokenizer.eos_ids:
            break
        times.append(perf_counter())
    return _a_token(times)


def _a_token(times: list[float]) -> float:
    if len(times) < 2:
        raise MtplxError("the model ends its answer at once: plain decoding cannot be timed")
    return (times[-1] - times[0]) / (len(times) - 1)
