"""What a round costs on this machine: measured by ``mtplx tune``, stored, found again.

Costs are stored per model, form of its weights, head, machine and version, in ``costs.json`` of the
cache. Where there are none the defaults are used, which may choose slower depths, never wrong text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from . import __version__, native
from .cpu_layers import is_fused
from .depth import DEFAULT_COSTS, KERNEL_COSTS, VNNI_COSTS, Costs
from .drafters import MTPDrafter, NoDrafter, Proposal
from .engine import Engine
from .environment import machine
from .errors import MtplxError
from .families import family_of
from .fetch import cache_dir
from .load import Bundle
from .metrics import Stats
from .mtp_patch import AttachedHead
from .provenance import replacing
from .rng import Draws
from .sampler_config import SamplerConfig
from .sequence import History, Sequence
from .state import State
from .text import TextOutput

ROWS = (*range(1, 10), 13)
PASSES = 40
_TEXT = "Every evening the keeper climbed the steps, lit the great lamp, and watched the boats. "
_CONTEXT = 128
# The head is timed over one draft and over this many: the difference is pure steps.
_DRAFTS = 5
_FIELDS = {"key", "forward", "draft", "start"}


# --- measuring --------------------------------------------------------------------------------


def measure(bundle: Bundle, progress: Callable[[], None] = lambda: None) -> Costs:
    """Seconds of a round by the rows it verifies and of a step of the head: medians, in turn.

    progress: called before each of ``PASSES`` passes; the first one warms up.
    """
    ids = _context(bundle)
    timed = [_rounds(bundle, ids), *_forwards(bundle, ids)]
    timed += [] if bundle.attached is None else _drafting(bundle.attached, ids)
    seconds: list[list[float]] = [[] for _ in timed]
    for _ in range(PASSES):
        progress()
        for call, column in zip(timed, seconds, strict=True):
            column.append(call())
    around, *found = [median(column[1:]) for column in seconds]
    around = max(around - found[0], 0.0)  # what a round takes besides forward and laws
    forward = np.interp(range(1, ROWS[-1] + 1), ROWS, found[: len(ROWS)]) + around
    if bundle.attached is None:
        return Costs(tuple(forward.tolist()))
    one, several = found[len(ROWS) :]
    draft = (several - one) / (_DRAFTS - 1)
    if draft <= 0:
        raise MtplxError("a draft took no time at all: the machine is too busy, run it again")
    return Costs(tuple(forward.tolist()), draft, max(one - draft, 0.0))


def _context(bundle: Bundle) -> list[int]:
    """Tokens to run after, and then a block of the most rows."""
    config = bundle.provenance.config
    inner = config.get("text_config") or {}
    most = config.get("max_position_embeddings", inner.get("max_position_embeddings"))
    length = min(_CONTEXT + ROWS[-1], most or _CONTEXT + ROWS[-1])
    return (bundle.tokenizer.encode(_TEXT) * length)[:length]


def _rounds(bundle: Bundle, ids: list[int]) -> Callable[[], float]:
    """Times a whole round without drafts; each goes on where the one before it ended."""
    start = ids[: max(2, len(ids) - ROWS[-1] - PASSES)]
    head, drafter = bundle.attached, NoDrafter()
    state = State(family_of(bundle.trunk) if head is None else head.family)
    sequence = Sequence(
        tokens=list(start), prompt_length=len(start), max_tokens=PASSES + 1, state=state,
        drafter=drafter, history=History(SamplerConfig(), start), draws=Draws(0), rule="block",
        depth=0, eos_ids=frozenset(), output=TextOutput(bundle.tokenizer.detokenizer(), ()),
        stats=Stats(drafter.name, "block", 0),
    )  # fmt: skip
    engine = Engine(0)  # it drafts nothing

    def timed() -> float:
        begin = perf_counter()
        engine.step([sequence])
        return perf_counter() - begin

    return timed


def _forwards(bundle: Bundle, ids: list[int]) -> list[Callable[[], float]]:
    """Each times a forward over its rows and their laws, and takes it back."""
    head, history = bundle.attached, History(SamplerConfig(), ids)
    state = State(family_of(bundle.trunk) if head is None else head.family)
    for _ in state.prefill(ids[: -ROWS[-1]]):
        pass

    def timed(rows: int) -> float:
        block = ids[-ROWS[-1] :][:rows]
        mark = state.mark(rows)
        begin = perf_counter()
        _, logits = state.forward(block)
        history.laws(logits, block[1:])
        seconds = perf_counter() - begin
        state.rollback(mark, [])
        return seconds

    return [partial(timed, rows) for rows in ROWS]


def _drafting(head: AttachedHead, ids: list[int]) -> list[Callable[[], float]]:
    """Time proposals of one draft and of ``_DRAFTS``, each after a forward and a new row."""
    drafter, history, draws = MTPDrafter(head), History(SamplerConfig(), ids), Draws(0)
    state = State(head.family)
    drafter.observe(ids, None)
    for hidden in state.prefill(ids[:-1]):
        drafter.observe([], hidden)
    proposal = Proposal(
        history.draft_law, lambda i, q: draws.draft(len(ids), i, q), head.family.vocab_size
    )

    def timed(depth: int) -> float:
        mark = state.mark(1)
        hidden, logits = state.forward(ids[-1:])
        mx.eval(hidden, logits)
        state.rollback(mark, [])
        begin = perf_counter()
        drafter.observe(ids[:1], hidden)
        drafter.propose(depth, proposal)
        return perf_counter() - begin

    return [partial(timed, 1), partial(timed, _DRAFTS)]


# --- storing ----------------------------------------------------------------------------------


def in_force(bundle: Bundle, draft_model: Bundle | None = None) -> tuple[Costs, dict[str, Any]]:
    """The costs to choose depths by, and what statistics say of them.

    A step of a draft model is not measured: a forward over one row takes as long as its weights
    take to be read, so it costs as much of the trunk's as its weights have of the trunk's bytes.
    """
    note = {}
    try:
        found = stored(bundle)
    except (MtplxError, OSError) as e:  # costs only decide about speed
        found, note = None, {"note": str(e)}
    default = DEFAULT_COSTS
    if is_fused(bundle.trunk):
        default = VNNI_COSTS if native.status().isa == "avx512vnni" else KERNEL_COSTS
    costs = (found or default).relative()
    source = "default" if found is None else "tuned"
    if draft_model is not None:
        share = round(_nbytes(draft_model) / _nbytes(bundle), 4)
        costs, note["draft_from"] = Costs(costs.forward, share), "bytes"
    return costs, {"from": source, **_numbers(costs), **note}


def _nbytes(bundle: Bundle) -> int:
    """Of a trunk's weights, those that the CPU kernels hold among them."""
    parameters: dict[str, Any] = dict(tree_flatten(bundle.trunk.parameters()))
    packed = [m.matrix.nbytes for m in bundle.trunk.modules() if hasattr(m, "matrix")]
    return sum(value.nbytes for value in parameters.values()) + sum(packed)


def stored(bundle: Bundle) -> Costs | None:
    """What ``store`` stored for this model, head, machine and version; None if it did not.

    Raises ``MtplxError`` if the file is damaged.
    """
    entries = _read(_path())
    entry = entries and entries.get(_digest(_key(bundle)))
    return _costs(entry) if entry else None


def store(bundle: Bundle, costs: Costs) -> Path:
    """Keep costs for later runs; the file they are in. A damaged one is replaced."""
    path, key = _path(), _key(bundle)
    try:
        entries = _read(path)
    except MtplxError:
        entries = {}
    entries[_digest(key)] = {"key": key, **_numbers(costs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(json.dumps(entries, indent=1))
    return path


def _path() -> Path:
    return cache_dir() / "costs.json"


def _read(path: Path) -> dict[str, Any]:
    """Entries by digest of their key, every one of them checked."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("no object")
        for digest, entry in entries.items():
            if entry.keys() != _FIELDS or _digest(entry["key"]) != digest:
                raise ValueError(f"an entry has the fields {sorted(entry)}")
            _costs(entry)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise MtplxError(
            f"{path} cannot be used ({e}), so depths are chosen by default costs; `mtplx tune`"
            " writes it anew"
        ) from e
    return entries


def _numbers(costs: Costs) -> dict[str, Any]:
    return {"forward": costs.forward, "draft": costs.draft, "start": costs.start}


def _costs(entry: dict[str, Any]) -> Costs:
    return Costs(tuple(entry["forward"]), entry["draft"], entry["start"])


def _digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _key(bundle: Bundle) -> dict[str, Any]:
    """All that costs depend on. Of a head only the shapes matter."""
    files = []
    for file in bundle.provenance.files:
        status = file.stat()
        files.append([str(file.absolute()), status.st_size, status.st_mtime_ns])
    return {
        "trunk": files,
        "runs": bundle.provenance.runs,
        "head": _shapes(bundle.head),
        "device": [str(mx.default_device()), str(mx.device_info().get("device_name"))],
        "machine": machine(),
        "mtplx": [__version__, native.VERSION],
    }


def _shapes(head: Any) -> list[Any]:
    if head is None:
        return []
    vocabulary = getattr(head, "vocabulary", None)  # a chain drafts from all
    parameters: dict[str, Any] = dict(tree_flatten(head.parameters()))
    return [
        0 if vocabulary is None else len(vocabulary.ids),
        sorted([name, list(value.shape), str(value.dtype)] for name, value in parameters.items()),
    ]
