"""The MTP head on prompts that it was not trained on: acceptance, and speed against AR.

What is compared with drafts of another kind (depths, draft vocabularies, copying) runs under the
coupled rule, so that all sides write the same text; the rest is as in ``measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import replace

from .. import heldout
from ..agreement import difference
from ..api import Generation, encode_prompt
from ..load import Bundle
from ..measure import Way, measure, outputs_of, side_by_side, summed
from ..progress import steps
from ..sampler_config import SamplerConfig
from . import copy
from .prompts import COPY_PROMPTS
from .report import Report

_SAMPLING = SamplerConfig(temperature=0.6, top_p=0.95, top_k=20)
_EACH, _FEW, _FEW_IN_FULL = 12, 3, 12
_DEPTHS = (0, 1, 2, 3, 4, 6)
_TOKENS = 64


def run(bundle: Bundle, *, full: bool = False) -> Report:
    """All figures, on 12 prompts of each kind, or with ``full`` on all 244."""
    read = heldout.prompts if full else lambda name: heldout.chosen(name, _EACH)
    prompts = {name: read(name) for name in heldout.SOURCES}
    each = _FEW_IN_FULL if full else _FEW
    few = [text for group in prompts.values() for text in heldout.spread(group, each)]
    count = sum(map(len, prompts.values()))
    with steps(outputs_of(count) + len(COPY_PROMPTS) + (5 + len(_DEPTHS)) * len(few)) as step:
        found = measure(bundle, prompts, tokens=_TOKENS, before=step)
        figures, notes = found.figures, found.notes
        copied = copy.compare(bundle, 0.6, "auto", notes, lambda: step("copying"))
        figures["speed_vs_ar_copy"] = copied.ratio()
        figures |= _depths(bundle, few, lambda: step("depths"))
        figures["draft_vocabulary_speed"] = _without(
            bundle, "vocabulary", None, few, lambda: step("draft vocabulary")
        )
        figures["copy_bonus_speed"] = _without(
            bundle, "copy_bonus", (), few, lambda: step("copy bonus")
        )
    texts = [text for group in prompts.values() for text in group]
    figures["greedy_identical"] = _identical(bundle, texts, found.outputs[0.0], notes)
    figures["prompts"] = count
    return Report("mtp", figures, notes=notes)


def _speeds(
    ways: Mapping[str, Way], prompts: Sequence[str], before: Callable[[], None]
) -> dict[str, float]:
    """Tokens/s of each way; all of them write the same."""
    found = side_by_side(ways, prompts, _SAMPLING, tokens=_TOKENS, rule="coupled", before=before)
    return {name: summed(outputs).tokens_per_second for name, outputs in found.items()}


def _depths(
    bundle: Bundle, prompts: Sequence[str], before: Callable[[], None]
) -> dict[str, float | None]:
    """The head with depth "auto" against the best fixed depth, plain decoding among them."""
    ways = {"auto": Way(bundle, "mtp", "auto")}
    ways |= {f"tokens_per_second_depth_{k}": Way(bundle, "mtp", k) for k in _DEPTHS}
    speeds = _speeds(ways, prompts, before)
    auto = speeds.pop("auto")
    return {"auto_vs_best_fixed": auto / max(speeds.values()), **speeds}


def _without(
    bundle: Bundle, part: str, off: object, prompts: Sequence[str], before: Callable[[], None]
) -> float | None:
    """The head's tokens/s over those of itself without a part; None if it has no such part."""
    if bundle.head is None or not getattr(bundle.head, part, None):
        return None
    head = shallow_copy(bundle.head)
    setattr(head, part, off)
    ways = {"own": Way(bundle, "mtp", 3), "without": Way(replace(bundle, head=head), "mtp", 3)}
    speeds = _speeds(ways, prompts, before)
    return speeds["own"] / speeds["without"]


def _identical(
    bundle: Bundle,
    prompts: Sequence[str],
    outputs: Mapping[str, Sequence[Generation]],
    notes: list[str],
) -> float:
    """The share of prompts whose greedy outputs are AR's, or differ first at a near-tie."""
    same = 0
    for i, prompt in enumerate(prompts):
        plain, differ = outputs["ar"][i].token_ids, False
        for way in ("k3", "auto"):
            found = difference(
                bundle,
                encode_prompt(bundle, prompt),
                outputs[way][i].token_ids,
                plain,
                sampling=SamplerConfig(temperature=0.0),
                seed=0,
            )
            if found is not None:
                notes.append(f"prompt {i + 1}, T = 0, {way}: {found}")
                differ |= not found.near_tie
        same += not differ
    return same / len(prompts)
