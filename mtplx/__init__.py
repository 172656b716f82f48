"""Exact speculative decoding with multi-token prediction, on MLX.

    import mtplx

    bundle = mtplx.load()
    print(mtplx.generate(bundle, "Name three rivers.", seed=1).text)

MLX is not imported, and no BLAS is chosen, before something here needs it: ``use_blas`` comes first
if another BLAS than the fastest is wanted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .blas import activate as use_blas

# Bound here and now, so that ``mtplx.load`` is the function and never the module of that name.
from .convert import convert
from .errors import MtplxError
from .fetch import pull
from .load import Bundle, load
from .options import Options
from .sampler_config import SamplerConfig

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Chunk, Generation, Stream, generate, stream

_NEEDS_MLX = {"Chunk", "Generation", "Stream", "generate", "stream"}

__all__ = [
    "Bundle",
    "Chunk",
    "Generation",
    "MtplxError",
    "Options",
    "SamplerConfig",
    "Stream",
    "__version__",
    "convert",
    "generate",
    "load",
    "pull",
    "stream",
    "use_blas",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_MLX:
        raise AttributeError(f"module 'mtplx' has no attribute {name!r}")
    # A faster BLAS can only be put under MLX before MLX is imported, which ``api`` does.
    use_blas()
    value = getattr(import_module(".api", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
