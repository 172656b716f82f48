"""CPU libraries for mtplx. Importing this imports neither MLX nor the compiled kernels.

``blas_library`` says where the library lies that is opened with ctypes before MLX; ``native`` gives
the extension module with the kernels, which needs the very MLX that it was built against.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

__all__ = ["__version__", "blas_library", "native"]

__version__ = "0.7.2"


def blas_library() -> Path:
    """Return the path of the library that exports OpenBLAS under the plain CBLAS names.

    Raises:
        FileNotFoundError: the package was installed without its compiled library.
    """
    name = "libmtplx_blas.dylib" if sys.platform == "darwin" else "libmtplx_blas.so"
    path = Path(__file__).resolve().parent / name
    if not path.is_file():
        raise FileNotFoundError(f"mtplx-kernels is installed without its library {name}")
    return path


def native() -> Any:
    """Return the extension module ``_core``, after importing MLX.

    The environment variable MTPLX_ISA takes a level of instructions the first time:
    ``avx512vnni``, ``avx512``, ``avx2``, ``neon`` or ``portable``; without it the best that the
    processor has is used.

    Raises:
        ImportError: it was built against another version of MLX, was not built at all, or
            MTPLX_ISA names a level that is not there.
    """
    built = (Path(__file__).resolve().parent / "mlx_version.txt").read_text().strip()
    found = importlib.metadata.version("mlx")
    if built != found:
        raise ImportError(
            f"mtplx-kernels was built against mlx {built} and does not work with mlx {found}:"
            " build it again (pip install --no-build-isolation ./kernels)"
        )
    importlib.import_module("mlx.core")  # its library and its Python types have to be there first
    try:
        return importlib.import_module("mtplx_kernels._core")
    except ValueError as why:
        raise ImportError(str(why)) from why
