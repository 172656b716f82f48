"""The head that a model's own checkpoint carries: found by names, read on its loaded trunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .errors import ModelFileError

if TYPE_CHECKING:
    from .families.head import MTPChain


def claims(checkpoint: Checkpoint) -> dict[str, str]:
    """Stored name -> name in an ``MTPChain``, of the head's tensors; empty where there is none."""
    from .families import family_class
    from .families.native import NativeFamily, fitting

    family = family_class(checkpoint.config["model_type"])
    if not issubclass(family, NativeFamily):
        return {}
    with fitting(checkpoint):
        config = checkpoint.text_config
        places = {name: family.place(name, config) for name in checkpoint.stored}
    return {name: place for name, place in places.items() if place is not None}


def missing(checkpoint: Checkpoint) -> str:
    """Why a checkpoint without a head's tensors was expected to have some; "" if it was not."""
    from .families import family_class
    from .families.native import NativeFamily

    family = family_class(checkpoint.config["model_type"])
    count = family.count(checkpoint) if issubclass(family, NativeFamily) else 0
    if not count:
        return ""
    return (
        f"config.json tells of {count} MTP head{'s' * (count > 1)}, but their tensors are not in"
        " the checkpoint (most conversions drop them; `mtplx convert` keeps them)"
    )


def read(
    trunk: Any, checkpoint: Checkpoint, *, float32: bool, values: bool = True
) -> tuple[MTPChain | None, str]:
    """The checkpoint's own head, or None, and why there is none where one was to be expected.

    float32: widened to it.  values: False looks at names and shapes only.  Raises as
    ``families.native.read_chain``, ``ModelFileError`` for a tensor beside the model's own files
    that is no head's, and ``ModelError`` for a format that cannot be read.
    """
    import mlx.core as mx

    from .families import family_of
    from .families.native import NativeFamily, fitting, read_chain
    from .families.tensors import check_formats
    from .precision import to_float32

    found, family = claims(checkpoint), family_of(trunk)
    for name, tensor in checkpoint.sidecar.items():
        if isinstance(family, NativeFamily) and name not in found:
            raise ModelFileError(
                f"{tensor.file}: tensor {name!r} belongs to no head that is known of a"
                f" {checkpoint.config['model_type']} model", path=tensor.file, tensor=name,
            )  # fmt: skip
    if not found:
        return None, missing(checkpoint)
    assert isinstance(family, NativeFamily)
    headers = {name: checkpoint.stored[name] for name in found}
    check_formats(headers)
    stored: dict[str, Any] = {}
    for file in sorted({tensor.file for tensor in headers.values()}):
        arrays: Any = mx.load(str(file))
        stored |= {name: value for name, value in arrays.items() if name in found}
    with fitting(checkpoint):
        chain = read_chain(family, stored, checkpoint, values=values)
    if float32:
        to_float32(chain)
    if values:
        mx.eval(chain.parameters())
    return chain, ""
