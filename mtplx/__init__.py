"""Exact speculative decoding with multi-token prediction, on MLX.

    import mtplx

    bundle = mtplx.load()
    print(mtplx.generate(bundle, "Name three rivers.", seed=1).text)

Names are loaded on first use: MLX is not imported, and no BLAS is chosen, before one is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Chunk, Generation, Stream, generate, stream
    from .blas import activate as use_blas
    from .errors import MtplxError
    from .fetch import pull
    from .load import Bundle, load
    from .options import Options
    from .sampler_config import SamplerConfig

# Public name -> the module it lives in, and its name there.
_PUBLIC = {
    "Bundle": ("load", "Bundle"),
    "Chunk": ("api", "Chunk"),
    "Generation": ("api", "Generation"),
    "MtplxError": ("errors", "MtplxError"),
    "Options": ("options", "Options"),
    "SamplerConfig": ("sampler_config", "SamplerConfig"),
    "Stream": ("api", "Stream"),
    "generate": ("api", "generate"),
    "load": ("load", "load"),
    "pull": ("fetch", "pull"),
    "stream": ("api", "stream"),
    "use_blas": ("blas", "activate"),
}
_NEEDS_MLX = {"api", "load"}

__all__ = [
    "Bundle",
    "Chunk",
    "Generation",
    "MtplxError",
    "Options",
    "SamplerConfig",
    "Stream",
    "__version__",
    "generate",
    "load",
    "pull",
    "stream",
    "use_blas",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mtplx' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    if module in _NEEDS_MLX:
        # A faster BLAS can only be put under MLX before MLX is imported.
        import_module(".blas", __name__).activate()
    value = getattr(import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
