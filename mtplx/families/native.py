"""Families whose checkpoints carry a head of their own, and how such a head is read.

A family says where the head's tensors are (``table``), what turns them into what mlx-lm's layers
expect (``settle``) and what the head is made of (``new_head``). Reading is the same for all: every
tensor has its place, and every place its tensor.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint import Checkpoint
from ..errors import ModelError, ModelFileError
from ..strict import load_strictly
from . import tensors
from .head import MTPChain, MTPHead
from .trunk import TrunkFamily

Weights = dict[str, mx.array]

# What stands before the names where the language model is a part of the checkpoint.
_WRAPPER = re.compile(r"^(model\.)?language_model\.(model\.)?")
# More heads than any checkpoint has: what lies beyond their number is reported, not overlooked.
MOST_HEADS = 16
# The table's word for what a checkpoint holds of the trunk again: it is not read.
SHARED = "shared."


class NativeFamily(TrunkFamily):
    """A family whose checkpoints may carry a head: a chain of one or more.

    count_key: the entry of config.json that tells how many.  zero_centred: whether norms are stored
    as w - 1 in files that mlx-lm has not converted.
    """

    count_key = "num_nextn_predict_layers"
    zero_centred = False
    config: Mapping[str, Any] = {}  # the language model's part of config.json, of a head to be read

    # --- what a family declares ---

    @classmethod
    @abstractmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """Beginnings of stored names, and of the names in an ``MTPChain`` that they stand for.

        The first that fits counts. A last row to "unknown." claims what has no place, for an error.
        config: the language model's part of config.json.
        """

    @abstractmethod
    def new_block(self, index: int) -> Any:
        """The decoder layer of head ``index``: called with x (B, L, D), a mask and a cache."""

    def new_layer(self) -> Any:
        """See ``HeadedFamily.new_layer``."""
        return self.new_block(0)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """Head ``index``, its weights of no meaning.  names: those stored for it, unprefixed."""
        return MTPHead(self.hidden_size, self.norm_eps, self.new_block(index), normed=self.normed)

    def settle(self, weights: Weights) -> Weights:
        """Weights by their names in the chain, as mlx-lm's modules take them."""
        return weights

    # --- what follows from it ---

    @classmethod
    def count(cls, checkpoint: Checkpoint) -> int:
        """How many heads the configuration tells of; 0 if it does not say.

        Raises ``ModelFileError`` for what is no such number: so many are then built.
        """
        value, file = checkpoint.text_config.get(cls.count_key), checkpoint.path / "config.json"
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_HEADS):
            raise ModelFileError(
                f"{file}: {cls.count_key} is {value!r}, not a number of MTP heads up to"
                f" {MOST_HEADS}", path=file,
            )  # fmt: skip
        return value or 0

    @classmethod
    def place(cls, name: str, config: Mapping[str, Any]) -> str | None:
        """The name in an ``MTPChain`` of a stored tensor; None for one of the trunk's."""
        short = _WRAPPER.sub(lambda found: "model." if found[1] or found[2] else "", name)
        # Beside a language model's layers, a head's names may stand without "model.".
        beside = [] if short == name else [short.removeprefix("model.")]
        for known in (short, *beside):
            for stored, own in cls.table(config):
                if known.startswith(stored):
                    return own + known[len(stored) :]
        return None

    @classmethod
    def stored_name(cls, place: str, config: Mapping[str, Any]) -> str:
        """The inverse of ``place``, without a wrapper."""
        for stored, own in cls.table(config):
            if place.startswith(own):
                return stored + place[len(own) :]
        return place

    def by_trunk(self, weights: Weights, index: int) -> Weights:
        """A decoder layer's weights, by their names in it, as mlx-lm makes them for the trunk.

        index: a layer of the trunk of the same kind.
        """
        prefix = f"model.layers.{index}."
        made = self.text.sanitize({prefix + name: value for name, value in weights.items()})
        return {name.removeprefix(prefix): value for name, value in made.items()}

    def layers_by_trunk(self, weights: Weights, index: int) -> Weights:
        """``by_trunk`` of every head's decoder layer; the other weights as they are."""
        out, blocks = dict[str, mx.array](), dict[str, Weights]()
        for name, value in weights.items():
            head, layer, rest = name.partition(".layer.")
            if layer:
                blocks.setdefault(head + layer, {})[rest] = value
            else:
                out[name] = value
        for prefix, block in blocks.items():
            out |= {prefix + name: value for name, value in self.by_trunk(block, index).items()}
        return out


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Families, like the classes they use, fail in any way on what is not theirs."""
    try:
        yield
    except ModelError:
        raise
    except Exception as e:
        what = f"{checkpoint.path}: its MTP head cannot be built ({type(e).__name__}: {e})"
        raise ModelFileError(what, path=checkpoint.path) from e


def read_chain(
    family: NativeFamily, stored: Weights, checkpoint: Checkpoint, *, values: bool = True
) -> MTPChain:
    """The chain of a trunk's own heads from its stored tensors.

    values: False looks at names and shapes only, and reads no tensor; the chain is of no use then.

    Raises ``ModelFileError`` naming the tensor that is missing, extra, there twice or of a wrong
    shape.
    """
    config = family.config = checkpoint.text_config
    placed: Weights = {}
    origin: dict[str, str] = {}
    for name, value in stored.items():
        place = family.place(name, config)
        assert place is not None
        if place.startswith(SHARED):
            continue
        if place in placed:
            raise ModelFileError(
                f"{checkpoint.path}: tensor {name!r} is the head's {origin[place]!r} again",
                path=checkpoint.path, tensor=name,
            )  # fmt: skip
        placed[place], origin[place] = value, name
    try:
        weights = tensors.plain_formats(placed)
        if family.zero_centred and values:
            weights = tensors.centre_norms(weights)
        weights = family.settle(weights)
    except tensors.UnfitError as e:
        name = origin.get(e.args[0]) or family.stored_name(e.args[0], config)
        raise ModelFileError(
            f"{checkpoint.path}: tensor {name!r} {e.args[1]}", path=checkpoint.path, tensor=name
        ) from None
    count = _count(family, weights, checkpoint)
    chain = MTPChain([family.new_head(i, _names_of(i, weights)) for i in range(count)])
    _quantise(chain, weights, checkpoint, family)
    load_strictly(
        chain, list(weights.items()), checkpoint=checkpoint,
        stored_name=lambda place: origin.get(place) or family.stored_name(place, config),
    )  # fmt: skip
    chain.eval()
    return chain


def _count(family: NativeFamily, weights: Weights, checkpoint: Checkpoint) -> int:
    numbers = {int(name.split(".")[1]) for name in weights if name.startswith("heads.")}
    told, places = family.count(checkpoint), family.table(checkpoint.text_config)
    if told and not any(own.startswith(f"heads.{told - 1}.") for _, own in places):
        file = checkpoint.path / "config.json"
        raise ModelFileError(
            f"{file}: {family.count_key} is {told}, more MTP heads than are known of a"
            f" {checkpoint.config['model_type']} model", path=file,
        )  # fmt: skip
    return told or max(numbers, default=0) + 1


def _names_of(index: int, weights: Weights) -> list[str]:
    prefix = f"heads.{index}."
    return [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]


def _quantise(
    chain: MTPChain, weights: Weights, checkpoint: Checkpoint, family: NativeFamily
) -> None:
    """Make the modules with stored scales quantised ones, each in its own way."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        columns = module.weight.shape[-1]
        words, groups = (weights[f"{path}.{part}"].shape[-1] for part in ("weight", "scales"))
        size, bits = columns / max(1, groups), words * 32 / columns
        stem = family.stored_name(f"{path}.weight", checkpoint.text_config)
        if size not in tensors.GROUP_SIZES or bits not in tensors.BITS:
            raise ModelFileError(
                f"{checkpoint.path}: tensor {stem!r} does not pack rows of {columns}",
                path=checkpoint.path, tensor=stem,
            )  # fmt: skip
        mode = checkpoint.setting(stem.removesuffix(".weight"), "mode", "affine")
        return {"group_size": int(size), "bits": int(bits), "mode": mode}

    nn.quantize(chain, class_predicate=choose)
