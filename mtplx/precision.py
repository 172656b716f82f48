"""Precisions that a loaded module is turned into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ModelError

if TYPE_CHECKING:
    import mlx.nn as nn


def to_float32(model: nn.Module) -> nn.Module:
    """Replaces packed modules by plain ones and widens 16-bit parameters, in place and lazily."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_unflatten
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    plain = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding,
             QuantizedSwitchLinear: SwitchLinear, QuantizedMultiLinear: MultiLinear}  # fmt: skip
    replaced = []
    for name, module in model.named_modules():
        if hasattr(module, "to_plain"):  # the CPU kernels'
            replaced.append((name, module.to_plain()))
            continue
        target = plain.get(type(module))
        if target is None:
            if hasattr(module, "scales") and hasattr(module, "bits"):
                raise ModelError(
                    f"{name} ({type(module).__name__}) has no float32 form: load it packed"
                )
            continue
        affine = module.mode == "affine"  # other modes keep 8-bit scales of their own
        scales = module.scales.astype(mx.float32) if affine else module.scales
        biases = module.biases.astype(mx.float32) if affine else None
        weight = mx.dequantize(module.weight, scales, biases, group_size=module.group_size,
                               bits=module.bits, mode=module.mode)  # fmt: skip
        new = target.__new__(target)
        nn.Module.__init__(new)
        new.weight = weight.astype(mx.float32)
        if "bias" in module:
            new.bias = module.bias
        replaced.append((name, new))
    model.update_modules(tree_unflatten(replaced))
    model.set_dtype(mx.float32)
    return model.eval()
