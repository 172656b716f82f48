"""Every error mtplx raises on purpose.

    Exception
    +-- MtplxError                 anything below; catch this one to catch them all
        +-- ModelError             a model cannot be loaded or used
        |   +-- ModelFileError     a file is corrupt, truncated or wrong (names file and tensor)
        +-- FetchError             a model could not be downloaded
        +-- PublishError           a head could not be uploaded
        +-- BlasError              a BLAS that was asked for cannot be had
        +-- RequestError           a request asks for something impossible (also a ValueError)
        +-- StateError             a rollback would not be exact
        +-- NonFiniteLogitsError   logits hold no distribution (also a RuntimeError)

Arguments of the wrong type or range raise plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from pathlib import Path


class MtplxError(Exception):
    """Base of every error that mtplx raises on purpose."""


class ModelError(MtplxError):
    """A model cannot be loaded or used."""


class ModelFileError(ModelError):
    """A model file is corrupt, truncated or not what it should be.

    ``path`` is the file and ``tensor`` the tensor in it, or None where the whole file is meant.
    """

    def __init__(self, message: str, *, path: str | Path | None = None, tensor: str | None = None):
        self.path = None if path is None else Path(path)
        self.tensor = tensor
        super().__init__(message)


class FetchError(MtplxError):
    """A model could not be downloaded, or what came is not what was expected."""


class PublishError(MtplxError):
    """A head could not be uploaded."""


class BlasError(MtplxError):
    """The BLAS that was asked for by name cannot be used in this process."""


class RequestError(MtplxError, ValueError):
    """A generation request asks for something that cannot be done."""


class StateError(MtplxError):
    """A rollback that would not be exact was refused."""


class NonFiniteLogitsError(MtplxError, RuntimeError):
    """A row holds NaN, +inf, or nothing above -inf (or no mass): it defines no distribution.

    ``nan_count`` and ``inf_count`` count the offending entries of a row of ``vocab_size``; None
    where they do not apply.
    """

    def __init__(
        self,
        message: str,
        *,
        nan_count: int | None = None,
        inf_count: int | None = None,
        vocab_size: int | None = None,
    ):
        self.nan_count = nan_count
        self.inf_count = inf_count
        self.vocab_size = vocab_size
        super().__init__(message)
