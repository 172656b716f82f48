"""One prompt decoded with and without drafts under one seed, side by side as both stream."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from . import console
from .agreement import difference
from .api import Stream, encode_prompt, stream
from .load import Bundle
from .metrics import Stats
from .sampler_config import SamplerConfig

PROMPT = (
    "Correct the spelling of this text and change nothing else: The old lighthouse stood at the"
    " end of the long peninsula, where the see met the sky. Every evening the keeper climbed the"
    " one hundred and twenty steps, lit the great lamp, and watched the fishing boats come home."
    " He knew each boat by the sound of its engin, and each captain by the song he sang."
)


class _Side:
    """A stream and what it has said so far."""

    def __init__(self, title: str, source: Stream):
        self.title, self.text, self._source = title, Text(), source
        self._chunks = iter(source)
        self.running = True

    @property
    def stats(self) -> Stats:
        return self._source.sequence.stats

    @property
    def token_ids(self) -> list[int]:
        return self._source.sequence.token_ids

    def step(self) -> None:
        """One round."""
        chunk = next(self._chunks, None)
        self.running = chunk is not None
        for segment in chunk.segments if chunk is not None else ():
            style = console.DRAFT_STYLE if segment.from_draft else ""
            self.text.append(segment.text, style=style)

    def panel(self, width: int) -> Panel:
        speed = f"{self.stats.tokens} tokens, {self.stats.tokens_per_second:.1f} tokens/s"
        return Panel(self.text, title=self.title, subtitle=speed, width=width)


def run(
    bundle: Bundle, prompt: str, *, sampling: SamplerConfig, max_tokens: int, seed: int
) -> None:
    """Stream both, then print a table and the first difference, if there is one.

    Both use the coupled rule, so the texts should be equal. They run in turn, a round each, the one
    that has used less time first: each is then as far as it would be by itself.
    """
    options = {"sampling": sampling, "max_tokens": max_tokens, "seed": seed, "verify": "coupled"}
    # The first forward of a process is slower than all others; neither should pay for it.
    with console.working("warming up"):
        stream(bundle, "Hello", **{**options, "max_tokens": 4, "draft": "none"}).result()
    plain = _Side("without drafts (AR)", stream(bundle, prompt, **options, draft="none"))
    drafted = _Side("with drafts (underlined)", stream(bundle, prompt, **options))
    out = Console(highlight=False)
    # Two columns where they can be redrawn; else the text once, as it comes.
    with Live(console=out, auto_refresh=False) if out.is_terminal else nullcontext() as live:
        while sides := [side for side in (plain, drafted) if side.running]:
            side = min(sides, key=lambda each: each.stats.decode_seconds)
            before = len(side.text)
            side.step()
            if live is not None:
                live.update(_columns(plain, drafted, out.width), refresh=True)
            elif side is drafted:
                sys.stdout.write(side.text.plain[before:])
                sys.stdout.flush()
    if live is None:
        print()
    prompt_ids, outputs = encode_prompt(bundle, prompt), (drafted.token_ids, plain.token_ids)
    found = difference(bundle, prompt_ids, *outputs, sampling=sampling, seed=seed)
    _table(plain.stats, drafted.stats, f"T = {sampling.temperature:g}, seed {seed}")
    print("the same text, token for token" if found is None else found)


def _columns(plain: _Side, drafted: _Side, width: int) -> RenderableType:
    return Columns([side.panel(width // 2 - 1) for side in (plain, drafted)])


def _table(plain: Stats, drafted: Stats, title: str) -> None:
    ratio = drafted.tokens_per_second / (plain.tokens_per_second or float("nan"))
    pairs = (plain, drafted)
    rows = [
        ["tokens", *(f"{stats.tokens}" for stats in pairs)],
        ["tokens/s", *(f"{stats.tokens_per_second:.1f}" for stats in pairs)],
        ["speed-up", "", f"{ratio:.2f}x"],
        ["acceptance length", "1.00", f"{drafted.acceptance_length:.2f} tokens a round"],
        ["drafts", "none", console.describe_sources(drafted.sources)],
        ["acceptance by position", "", console.describe_acceptance(drafted.acceptance_by_position)],
    ]
    console.print_table(title, ["figure", "without drafts (AR)", "with drafts"], rows)
