"""Decoding on a CPU against mlx-lm and llama.cpp, and what bounds it, side by side in one run.

mlx-lm and llama.cpp run in processes of their own (see ``peers``) and take turns with ours, on the
same cores, model file and prompts; figures are ratios of medians, or of sums over prompts. Whether
a verify forward gives the logits of plain decoding, bit for bit, and the coupled rule its text, is
checked in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, get_args

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .. import costs, heldout
from .. import measure as heads
from ..api import encode_prompt
from ..blas import Choice, status, thread_count
from ..device import on_cpu
from ..errors import MtplxError
from ..families import family_of
from ..load import Bundle
from ..measure import Way
from ..progress import steps
from ..sampler_config import SamplerConfig
from ..state import State
from . import law, peers, same
from .report import Report, markdown_table, number

# figure -> at least (or at most), aim.
GOALS = {
    "ar_vs_mlx_lm": (">= 20", "30"),
    "ar_vs_llamacpp": (">= 1.3", "1.8"),
    "rows4": ("<= 1.3", "1.15"),
    "rows8": ("<= 2", "1.6"),
    "head_step": ("<= 0.07", "0.05"),
    "bandwidth": (">= 0.5", "0.75"),
    "default_vs_llamacpp": (">= 1.9", "3"),
    "default_vs_ar": (">= 1.45", "1.8"),
    "prefill_vs_llamacpp": (">= 0.7", "1"),
    "law_vs_mlx_lm": (">= 30", "100"),
    "verify_bitwise": ("= 1", ""),
    "coupled_identical": ("= 1", ""),
    "peak_memory_mb": ("<= 400", "250"),
}
_NEED_LLAMA = ("ar_vs_llamacpp", "default_vs_llamacpp", "prefill_vs_llamacpp")
_SAMPLING = SamplerConfig(temperature=0.6, top_p=0.95, top_k=20)
_GREEDY = SamplerConfig(temperature=0.0)
_SHORT = "Write a story about a river."
_AR_REPEATS, _AR_TOKENS, _MLX_LM_TOKENS = 5, 48, 12
_ROWS, _ROW_REPEATS, _CONTEXT = (1, 2, 4, 8), 15, 128
_PREFILL, _PREFILL_REPEATS = 512, 3
_PROMPTS, _TOKENS = 8, 64
_OVERHEAD_PROMPTS, _OVERHEAD_TOKENS = 3, 32
_READ_BYTES, _READ_REPEATS = 256 * 2**20, 5


@dataclass
class CpuReport(Report):
    """Figures, those of the table of goals first."""

    def table(self) -> str:
        """The goals beside what was reached, then everything else."""
        rows = [
            [name, number(value), *GOALS.get(name, ("", ""))]
            for name, value in self.figures.items()
        ]
        return markdown_table(["figure", "value", "goal", "aim"], rows)


@dataclass
class _Run:
    """One run: what is measured, with whom, and what has been found."""

    bundle: Bundle
    full: bool
    step: Callable[[str], None]
    llama: peers.Peer | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def turns(self, calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
        """Median of what each call gives; they take turns, in an order that turns round."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for name in order:  # the first time is slower than all others
            calls[name]()
        for _ in range(repeats):
            for name in order:
                found[name].append(calls[name]())
            order.reverse()
        return {name: median(values) for name, values in found.items()}


def run(bundle: Bundle, *, full: bool = False) -> CpuReport:
    """All figures. full: all MT-bench prompts, all contexts to 2,000, 200 prompts coupled.

    Raises ``MtplxError`` where the default device is not a CPU.
    """
    if not on_cpu():
        raise MtplxError("bench cpu measures a CPU; MLX's default device here is another")
    parts: list[Callable[[_Run], None]] = [
        _plain, _rows, _step_costs, _bandwidth, _prefill, _default, _overhead, _law, _bitwise,
        _coupled, _memory,
    ]  # fmt: skip
    with steps(_steps(bundle, full)) as step:
        found = _Run(bundle, full, step)
        found.llama = _llama(found)
        try:
            for part in parts:
                part(found)
        finally:
            if found.llama is not None:
                found.llama.close()
    first = {name: found.figures.get(name) for name in GOALS}
    report = CpuReport("cpu", first | found.figures, notes=found.notes)
    report.machine["weights"] = bundle.provenance.runs
    if found.llama is not None:
        report.versions["llama-cpp-python"] = found.llama.about["version"]
    return report


def _steps(bundle: Bundle, full: bool) -> int:
    prompts = len(heldout.prompts("mt-bench")) if full else _PROMPTS
    overhead = 0 if bundle.head is None else heads.outputs_of(_OVERHEAD_PROMPTS, 1)
    return 9 + prompts + overhead + same.steps(full)


def _llama(run: _Run) -> peers.Peer | None:
    try:
        return peers.llama_cpp(run.bundle.provenance.path)
    except MtplxError as e:
        run.figures |= dict.fromkeys(_NEED_LLAMA)
        run.notes.append(f"{', '.join(_NEED_LLAMA)} are not measured: {e}")
        return None


def _per_token(answer: Mapping[str, Any]) -> float:
    if answer["tokens"] < 1:
        raise MtplxError("the model ends its answer at once: decoding cannot be timed")
    return float(answer["seconds"] / answer["tokens"])


# --- parts --------------------------------------------------------------------------------------


def _plain(run: _Run) -> None:
    """Plain decoding: ours, mlx-lm's as installed, llama.cpp's."""
    way, prompt = Way(run.bundle, "none", 0), encode_prompt(run.bundle, _SHORT)

    def own(sampling: SamplerConfig) -> float:
        times = [perf_counter() for _ in way.start(_SHORT, sampling, tokens=_AR_TOKENS)]
        return _per_token({"tokens": len(times) - 1, "seconds": times[-1] - times[0]})

    def theirs(peer: peers.Peer, tokens: int, temperature: float) -> float:
        return _per_token(peer.ask("decode", prompt=prompt, tokens=tokens, temperature=temperature))

    run.step("loading mlx-lm")
    stock = peers.mlx_lm(run.bundle.provenance.path)
    try:
        for label, sampling in (("_t0", _GREEDY), ("", _SAMPLING)):
            t = sampling.temperature
            run.step(f"plain decoding, T = {t:g}")
            calls = {
                "own": partial(own, sampling),
                "mlx_lm": partial(theirs, stock, _MLX_LM_TOKENS, t),
            }
            if run.llama is not None:
                calls["llamacpp"] = partial(theirs, run.llama, _AR_TOKENS, t)
            found = run.turns(calls, _AR_REPEATS)
            for name, seconds in found.items():
                known = "ar" if name == "own" else name
                run.figures[f"{known}_tokens_per_second{label}"] = 1 / seconds
                if name != "own":
                    run.figures[f"ar_vs_{name}{label}"] = seconds / found["own"]
    finally:
        stock.close()


def _rows(run: _Run) -> None:
    """A forward over several rows against one over 1 row, logits included, law not."""
    run.step("forwards by rows")
    ids = same.text_ids(run.bundle, _CONTEXT + _ROWS[-1])
    context, block = ids[: -_ROWS[-1]], ids[-_ROWS[-1] :]
    state = State(family_of(run.bundle.trunk))
    for _ in state.prefill(context):
        pass

    def own(rows: int) -> float:
        mark = state.mark(rows)
        begin = perf_counter()
        _, logits = state.forward(block[:rows])
        mx.eval(logits)
        seconds = perf_counter() - begin
        state.rollback(mark, [])
        return seconds

    calls = {f"{rows}": partial(own, rows) for rows in _ROWS}
    if (llama := run.llama) is not None:
        llama.ask("context", ids=context)
        for rows in _ROWS:
            calls[f"llamacpp {rows}"] = partial(_seconds, llama, "forward", block[:rows])
    found = run.turns(calls, _ROW_REPEATS)
    run.figures["forward_milliseconds"] = found["1"] * 1e3
    for rows in _ROWS[1:]:
        run.figures[f"rows{rows}"] = found[f"{rows}"] / found["1"]
        if llama is not None:
            ratio = found[f"llamacpp {rows}"] / found["llamacpp 1"]
            run.figures[f"llamacpp_rows{rows}"] = ratio
    if llama is not None:
        run.figures["llamacpp_forward_milliseconds"] = found["llamacpp 1"] * 1e3


def _seconds(peer: peers.Peer, do: str, ids: Sequence[int]) -> float:
    return float(peer.ask(do, ids=list(ids))["seconds"])


def _step_costs(run: _Run) -> None:
    """A draft step, and a forward over several rows, all with their laws, in steps of one row."""
    run.step("draft steps")
    found = costs.measure(run.bundle)
    for rows in _ROWS[1:]:
        run.figures[f"verify_rows{rows}"] = found.forward[rows - 1] / found.forward[0]
    if run.bundle.head is None:
        run.figures["head_step"] = None
        run.notes.append("head_step is not measured: the model has no MTP head")
    else:
        run.figures["head_step"] = found.draft / found.forward[0]


def _bandwidth(run: _Run) -> None:
    """Bytes of weights that a 1-row step reads per second, against what reading alone reaches."""
    run.step("memory")
    ceiling = _read_ceiling(thread_count())
    seconds = (run.figures["forward_milliseconds"] or np.nan) / 1e3
    rate = _weight_bytes(run.bundle) / seconds
    run.figures |= {
        "bandwidth": rate / ceiling,
        "read_ceiling_gb_per_second": ceiling / 1e9,
        "weights_mb": _weight_bytes(run.bundle) / 1e6,
    }


def _weight_bytes(bundle: Bundle) -> int:
    """Bytes of the weights that one row needs; an embedding that is only looked up is not."""
    held: dict[str, Any] = dict(tree_flatten(bundle.trunk.parameters()))
    for name, module in bundle.trunk.named_modules():
        if (matrix := getattr(module, "matrix", None)) is not None:  # in the kernels' layout
            held[name] = matrix
    tied = bundle.provenance.config.get("tie_word_embeddings", True)
    looked_up = () if tied else ("embed_tokens", "word_embeddings", "wte")
    return sum(w.nbytes for name, w in held.items() if not any(part in name for part in looked_up))


def _read_ceiling(threads: int) -> float:
    """Bytes per second of reading memory that is in no cache, with so many threads; the best."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, dtype=np.float32), threads)
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_READ_REPEATS):
            begin = perf_counter()
            list(pool.map(np.max, parts))  # NumPy releases the interpreter; bound by the memory
            best = min(best, perf_counter() - begin)
    return _READ_BYTES / best


def _prefill(run: _Run) -> None:
    run.step("prefill")
    ids = same.text_ids(run.bundle, _PREFILL)

    def own() -> float:
        state = State(family_of(run.bundle.trunk))
        begin = perf_counter()
        for _ in state.prefill(ids):
            pass
        return perf_counter() - begin

    calls: dict[str, Callable[[], float]] = {"own": own}
    if run.llama is not None:
        calls["llamacpp"] = partial(_seconds, run.llama, "prefill", ids)
    found = run.turns(calls, _PREFILL_REPEATS)
    run.figures["prefill_milliseconds"] = found["own"] * 1e3
    if run.llama is not None:
        run.figures["prefill_vs_llamacpp"] = found["llamacpp"] / found["own"]


def _default(run: _Run) -> None:
    """Default decoding at T = 0.6 against plain decoding and llama.cpp's, prompt by prompt.

    By the block rule, which is what decodes where nobody asks for a seed.
    """
    prompts = heldout.prompts("mt-bench") if run.full else heldout.chosen("mt-bench", _PROMPTS)
    ways = {"default": Way(run.bundle, "auto", "auto"), "ar": Way(run.bundle, "none", 0)}
    names = [*ways] + ([] if run.llama is None else ["llamacpp"])
    tokens, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    for seed, prompt in enumerate(prompts):
        run.step("default decoding")
        for name in names:
            if name in ways:
                stream = ways[name].start(
                    prompt, _SAMPLING, seed=seed, tokens=_TOKENS, rule="block"
                )
                stats = stream.result().stats
                done, took = stats.tokens, stats.decode_seconds
            else:
                assert run.llama is not None
                ids = encode_prompt(run.bundle, prompt)
                answer = run.llama.ask("decode", prompt=ids, tokens=_TOKENS, temperature=0.6)
                done, took = answer["tokens"], answer["seconds"]
            tokens[name] += done
            seconds[name] += took
        names.reverse()
    speed = {name: tokens[name] / seconds[name] for name in names}
    run.figures["default_tokens_per_second"] = speed["default"]
    run.figures["default_vs_ar"] = speed["default"] / speed["ar"]
    if run.llama is not None:
        run.figures["default_vs_llamacpp"] = speed["default"] / speed["llamacpp"]


def _overhead(run: _Run) -> None:
    """The share of a round outside the forwards of trunk and head, as ``bench mtp`` has it."""
    if run.bundle.head is None:
        run.notes.append("round_overhead is not measured: the model has no MTP head")
        return
    prompts = {"mt-bench": heldout.chosen("mt-bench", _OVERHEAD_PROMPTS)}
    found = heads.measure(
        run.bundle, prompts, temperatures=(0.6,), tokens=_OVERHEAD_TOKENS, before=run.step
    )
    for name in ("round_overhead", "verification_cost_t06"):
        run.figures[name] = found.figures[name]


def _law(run: _Run) -> None:
    run.step("law")
    figures = law.run().figures
    run.figures |= {name: figures[name] for name in ("law_vs_mlx_lm", "law_milliseconds")}


def _bitwise(run: _Run) -> None:
    found = same.bitwise(run.bundle, full=run.full, before=run.step)
    run.figures |= {
        "verify_bitwise": found.equal / found.positions,
        "verify_positions": found.positions,
        "verify_largest_difference": found.largest,
    }


def _coupled(run: _Run) -> None:
    run.figures["coupled_identical"] = same.coupled(
        run.bundle, full=run.full, before=run.step, notes=run.notes
    )


def _memory(run: _Run) -> None:
    """Peak of a process that decodes, above one that has only imported MLX."""
    run.step("peak memory")
    head = "none" if run.bundle.head is None else run.bundle.head_source
    if head in (None, "given"):
        run.notes.append("peak_memory_mb is not measured: the head is not from a file")
        return
    blas = status().name if status().name in get_args(Choice) else "auto"
    found = peers.own_memory(run.bundle.provenance.path, head, blas)
    run.figures |= {
        "peak_memory_mb": found["peak"] / 1e6,
        "peak_memory_imports_mb": found["imports"] / 1e6,
        "python_with_mlx_mb": found["mlx"] / 1e6,
    }
