"""What the contract of ``tests/test_families.py`` needs of a family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]
HIDDEN = 32  # numbers of a hidden state, in every case


def swiglu(prefix: str, inner: int, experts: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated projection, or of so many in one tensor each."""
    return {
        f"{prefix}.gate_proj.weight": (*experts, inner, HIDDEN),
        f"{prefix}.up_proj.weight": (*experts, inner, HIDDEN),
        f"{prefix}.down_proj.weight": (*experts, HIDDEN, inner),
    }


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint of a family in its real names, as its makers publish it.

    config: config.json, without the ids of tokens.  shapes: of every stored tensor, trunk and head.
    reference: (weights by the names of ``plain``, the language model's configuration, hidden
    (L, D), tokens (L,)) -> logits (L, V) of the first head in float64.  plain: a stored name as the
    reference calls it.  zero_centred: whether norms are stored as w - 1.  head_count: in the chain.
    is_head: whether a stored name is the head's.  further: the same as reference of deeper heads.
    """

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    reference: Callable[..., np.ndarray]
    is_head: Callable[[str], bool]
    plain: Callable[[str], str] = str
    zero_centred: bool = False
    head_count: int = 1
    further: tuple[Callable[..., np.ndarray], ...] = ()
    values: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = field(
        default_factory=dict
    )  # of tensors, by the end of their names, that are not what ``weights`` makes of them

    @property
    def text_config(self) -> Mapping[str, Any]:
        return self.config.get("text_config", self.config)

    def weights(self, seed: int = 0) -> Arrays:
        """Random float32: matrices of gain 1, norms near 1 (stored as the family does)."""
        rng = np.random.default_rng(seed)
        return {name: self._tensor(rng, name, shape) for name, shape in self.shapes.items()}

    def _tensor(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        for end, make in self.values.items():
            if name.endswith(end):
                return make(rng, shape).astype(np.float32)
        noise = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            gain = 0.5 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5
            return noise * np.float32(gain)
        base = 0.0 if self.zero_centred or "norm" not in name else 1.0
        return (base + 0.1 * noise).astype(np.float32)

    def numpy_weights(self, weights: Arrays) -> dict[str, np.ndarray]:
        """As the reference takes them."""
        return {self.plain(name): value.astype(np.float64) for name, value in weights.items()}

    def write(self, path: Path, weights: Arrays | None = None, **config: Any) -> Path:
        """A directory as it is published."""
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights or self.weights(), path / "model.safetensors", {"format": "pt"})
        write_rest(path, dict(self.config) | config)
        return path


def write_rest(path: Path, config: Mapping[str, Any]) -> None:
    """config.json and a tokenizer."""
    known = {"eos_token_id": tiny.EOS, "bos_token_id": 1}
    (path / "config.json").write_text(json.dumps(dict(config) | known))
    tiny.tiny_tokenizer().save(str(path / "tokenizer.json"))
    about = {
        "eos_token": tiny.SPECIAL[2], "chat_template": tiny.TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(about))
