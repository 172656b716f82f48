"""CPU libraries for mtplx, opened with ctypes: this module only says where they lie."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["__version__", "blas_library"]

__version__ = "0.1.0"


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
