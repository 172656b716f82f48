"""Uploads a head to the Hugging Face Hub, or to where HF_ENDPOINT points."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .. import fetch, head_file
from ..errors import ModelFileError, PublishError, RequestError
from .card import CARD, MEASUREMENT, PLOT, TRAINING, card

FILES = (CARD, head_file.CONFIG, head_file.WEIGHTS, MEASUREMENT, TRAINING, PLOT)


def contents(folder: Path) -> dict[str, int]:
    """The files of a head that is fit to publish, with their sizes in bytes.

    Raises ``ModelFileError`` for a file that is missing or does not belong to the others.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise ModelFileError(f"{folder / name} is missing", path=folder / name)
    weights = folder / head_file.WEIGHTS
    if fetch.file_sha256(weights) != head_file.read_config(folder).sha256:
        raise ModelFileError(
            f"{weights}: its sha256 is not the one in {head_file.CONFIG}", path=weights
        )
    if (folder / CARD).read_bytes() != card(folder).encode():
        raise ModelFileError(
            f"{folder / CARD} is not what {TRAINING} and {MEASUREMENT} say: write it with"
            f" `mtplx forge card {folder}`", path=folder / CARD,
        )  # fmt: skip
    return {name: (folder / name).stat().st_size for name in FILES}


def publish(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
) -> dict[str, int]:
    """Upload a head's files in one commit, making the repository if need be; see ``contents``.

    Nothing in the folder is changed, and with ``dry_run`` nobody is contacted. The token is
    HF_TOKEN or that of `hf auth login`. Raises ``ModelFileError``, ``RequestError`` for a name that
    is none, and ``PublishError`` with the hub's reason.
    """
    files = contents(folder)
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as e:
        raise RequestError(f"{repo!r} names no repository: {e}") from None
    if dry_run:
        return files
    token = get_token()
    if token is None:
        raise PublishError("there is no token: set HF_TOKEN, or log in with `hf auth login`")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            allow_patterns=list(FILES),
            revision=revision,
            commit_message="MTP head, written by mtplx",
        )
    except Exception as e:  # the hub's client raises its own, its HTTP library's, and built-in ones
        raise PublishError(f"{api.endpoint} did not take {repo}: {_reason(e, token)}") from None
    return files


def _reason(error: BaseException | None, token: str) -> str:
    """What errors that caused one another say, without the token and without signed addresses."""
    said: list[str] = []
    while error is not None:
        text = " ".join(str(error).split()) or type(error).__name__
        said += [text] if text not in " ".join(said) else []
        error = error.__cause__
    useless = r"\?[^\s'\")]+| For more information check: \S+"
    return re.sub(useless, "", ": ".join(said).replace(token, "***"))
