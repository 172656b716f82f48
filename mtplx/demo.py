"""The main job, once with drafts and once without, and whether they agree."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from . import console
from .agreement import difference
from .api import encode_prompt, stream
from .load import Bundle
from .sampler_config import SamplerConfig

DEMO_PROMPT = (
    "Correct the spelling of this text and change nothing else: The old lighthouse stood at the"
    " end of the long peninsula, where the see met the sky. Every evening the keeper climbed the"
    " one hundred and twenty steps, lit the great lamp, and watched the fishing boats come home."
    " He knew each boat by the sound of its engin, and each captain by the song he sang."
)


def run(bundle: Bundle, prompt: str, *, max_tokens: int, seed: int) -> None:
    """Stream the text with drafts, decode it again without, print a table of both.

    Both use the coupled rule at T = 0.6 under one seed, so the texts should be equal.
    """
    sampling = SamplerConfig(temperature=0.6)
    options = {"sampling": sampling, "max_tokens": max_tokens, "seed": seed, "verify": "coupled"}
    # The first forward of a process is slower than all others; neither run should pay for it.
    with console.working("warming up"):
        stream(bundle, "Hello", **{**options, "max_tokens": 4, "draft": "none"}).result()
    speculative = stream(bundle, prompt, **options)
    console.stream_text(speculative, show_drafts=True)
    with console.working("decoding the same prompt without drafts"):
        plain = stream(bundle, prompt, **{**options, "draft": "none"}).result()
    result = speculative.result()
    found = difference(
        bundle,
        encode_prompt(bundle, prompt),
        result.token_ids,
        plain.token_ids,
        sampling=sampling,
        seed=seed,
    )
    stats, ar = result.stats, plain.stats
    ratio = stats.tokens_per_second / ar.tokens_per_second
    rows = [
        ["tokens", f"{stats.tokens}"],
        ["tokens/s", f"{stats.tokens_per_second:.1f}"],
        ["tokens/s without drafts (AR)", f"{ar.tokens_per_second:.1f}"],
        ["speed-up", f"{ratio:.2f}x"],
        ["acceptance length", f"{stats.acceptance_length:.2f} tokens a round"],
        ["drafts", console.describe_sources(stats.sources)],
        ["acceptance by position", console.describe_acceptance(stats.acceptance_by_position)],
        ["same output without drafts", "yes, token for token" if found is None else "no"],
    ]
    title = f"{stats.drafter} drafts, T = {sampling.temperature}, seed {seed}"
    console.print_table(title, ["figure", "value"], rows)
    if found is not None:
        print(found)
    if Console().is_terminal:
        Console(highlight=False).print(Text("underlined: from drafts", style="dim"))
