"""Step 1 of a training: the trunk writes its own data, and its features are kept with it.

Data lies in shards, each a function of the plan and its number alone, so that a run that was
stopped goes on with the next shard, and each written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ..cpu_layers import is_fused
from ..errors import ModelFileError
from ..load import Bundle
from ..mtp_patch import headed_family
from ..provenance import replacing
from ..state import State
from .conversation import Layout, Row, Seed, Style
from .streams import shares, side_by_side


@dataclass(frozen=True)
class DataPlan:
    """What the data are a function of, besides trunk, tokenizer and seeds.

    shards: how many.  rows, length: of each shard, in sequences and tokens.  levels: the trunk's
    layers whose outputs are kept beside the final hidden state.  streams: device queues that
    share the rows, so that one can multiply while another does what runs on a single core; the
    CPU kernels do nothing on a single core and get all rows at once.
    """

    seed: int = 0
    shards: int = 16
    rows: int = 256
    length: int = 320
    levels: tuple[int, ...] = ()
    streams: int = 2
    style: Style = field(default_factory=Style)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.shards * self.rows * self.length


@dataclass(frozen=True)
class Shard:
    """tokens (N, L) int32, kinds (N, L) uint8, features (N, L, F) float16."""

    tokens: np.ndarray
    kinds: np.ndarray
    features: np.ndarray


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{number:05d}.safetensors"


def read_shard(path: Path) -> Shard:
    """A shard as it was written."""
    return Shard(**load_file(path))


def distil(
    bundle: Bundle,
    seeds: Sequence[Seed],
    plan: DataPlan,
    folder: Path,
    *,
    on_progress: Callable[[int], None] = lambda tokens: None,
    before: Callable[[], None] = lambda: None,
) -> float:
    """Write the shards that are missing; the seconds that all of them took.

    on_progress: told how many tokens were added.  before: called before each shard.  Raises
    ``ModelFileError`` for a shard in ``folder`` that is not what it would be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encode = bundle.tokenizer.encode
    known = [(tuple(encode(s.text, add_special_tokens=False)), s.stem) for s in seeds]
    room, seconds = plan.length // 2, 0.0
    known = [(ids[:room], stem) for ids, stem in known if ids]
    for number in range(plan.shards):
        before()
        path, begin = shard_path(folder, number), perf_counter()
        origin = _origin(bundle, seeds, plan, number)
        if path.exists():
            seconds += _seconds_of(path, origin)
            on_progress(plan.rows * plan.length)
            continue
        shard = _write(bundle, known, plan, number, on_progress)
        took = perf_counter() - begin
        with replacing(path) as temporary:
            save_file(vars(shard), temporary, {"origin": origin, "seconds": f"{took:.1f}"})
        seconds += took
    return seconds


def _origin(bundle: Bundle, seeds: Sequence[Seed], plan: DataPlan, number: int) -> str:
    """A hash of all that a shard is a function of."""
    what = asdict(plan)
    del what["shards"], what["streams"]
    parts = [what, number, [asdict(seed) for seed in seeds], bundle.provenance.sha256]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _seconds_of(path: Path, origin: str) -> float:
    """How long a shard took that is there already."""
    try:
        with safe_open(str(path), "np") as file:
            metadata = file.metadata() or {}
        if metadata.get("origin") != origin:
            raise ValueError("it is of another plan, trunk or prompts")
        return float(metadata["seconds"])
    except Exception as e:  # the library raises its own error type
        raise ModelFileError(f"{path}: cannot be used, remove it ({e})", path=path) from e


def _write(
    bundle: Bundle,
    seeds: Sequence[tuple[tuple[int, ...], bool]],
    plan: DataPlan,
    number: int,
    on_progress: Callable[[int], None],
) -> Shard:
    layout = Layout.of(bundle.tokenizer)
    random = np.random.default_rng([plan.seed, number])
    rows = [
        Row(layout, seeds, plan.style, bundle.tokenizer.eos_ids, child)
        for child in random.spawn(plan.rows)
    ]
    tokens = np.zeros((plan.rows, plan.length), np.int32)
    kinds = np.zeros((plan.rows, plan.length), np.uint8)
    streams = 1 if is_fused(bundle.trunk) else plan.streams
    groups = [
        _Group(bundle, plan, rows[part], tokens[part], kinds[part])
        for part in shares(plan.rows, streams)
    ]
    for at in range(plan.length):
        side_by_side(partial(_Group.advance, at=at), groups)
        on_progress(plan.rows)
    features = np.concatenate([group.features for group in groups])
    return Shard(tokens, kinds, features)


class _Group:
    """Rows that advance together, always on one thread."""

    def __init__(
        self,
        bundle: Bundle,
        plan: DataPlan,
        rows: Sequence[Row],
        tokens: np.ndarray,
        kinds: np.ndarray,
    ):
        self._family = headed_family(bundle.trunk, plan.levels)
        self._cache = State(self._family).caches
        self._rows, self._tokens, self._kinds = rows, tokens, kinds
        self._sampled: list[int] = []  # rows whose next token is; the first one is given
        self._logits = np.zeros((0, 0), np.float32)  # of these rows
        self.features = np.zeros((len(rows), plan.length, 0), np.float16)

    def advance(self, at: int) -> None:
        """Put a token in column ``at`` of every row, and run the trunk over it."""
        logits = dict(zip(self._sampled, self._logits, strict=True))
        for i, row in enumerate(self._rows):
            self._tokens[i, at], self._kinds[i, at] = row.next(logits.get(i))
        self._sampled = [i for i, row in enumerate(self._rows) if not row.given]
        column = mx.array(self._tokens[:, at : at + 1])
        features = self._family.prefill(column, self._cache)[:, 0]
        pending = [features.astype(mx.float16)]
        if self._sampled:
            final = features[mx.array(self._sampled), : self._family.hidden_size]
            pending.append(self._family.logits(final).astype(mx.float32))
        mx.eval(pending)
        values, *found = (np.asarray(array) for array in pending)
        self._logits = found[0] if found else self._logits[:0]
        if not self.features.size:
            self.features = np.zeros((*self._tokens.shape, values.shape[1]), np.float16)
        self.features[:, at] = values
