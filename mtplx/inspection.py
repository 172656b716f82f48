"""What ``mtplx inspect`` shows: a model's facts, read from headers without building the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplx import checkpoint, fetch, gguf, gguf_llama, head_file, native_head, tokenizer
from mtplx.checkpoint import Checkpoint
from mtplx.fetch import DEFAULT_MODEL
from mtplx.load import check_supported, describe_run, resolve_weights


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model on disk; None where the model does not say."""

    source: str
    path: str
    format: str  # "gguf" or "safetensors"
    architecture: str
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    vocab_size: int | None
    context: int | None  # tokens
    parameters: int  # weights, tied ones once
    quantisation: Mapping[str, str]  # stored type by group of tensors
    file_bytes: int
    tied_embeddings: bool
    mtp: str  # the head that load() would use, by its mtp_config.json, or why there is none
    drafts: str  # "mtp" or "ngram": what drafts by default
    chat_template: bool
    runs: str  # what load() would compute with on this device

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return dataclasses.asdict(self) | {"quantisation": dict(self.quantisation)}


def inspect(model: str | Path = DEFAULT_MODEL) -> ModelInfo:
    """Checks and describes a model: a known name or hub's id (pulled), a directory or a ``.gguf``.

    Nothing is downloaded and no weights are read. Raises what ``load`` raises for a model that
    cannot be loaded, except for errors that only show in the weights.
    """
    path = fetch.resolve(model, download=False)
    if path.is_dir():
        return _directory(fetch.origin(model, path), checkpoint.read_checkpoint(path))
    return _gguf(str(model), gguf.read_header(path))


def _gguf(source: str, file: gguf.GgufFile) -> ModelInfo:
    config = gguf_llama.config(file)
    named = gguf_llama.name_tensors(file, config)
    stored = gguf_llama.quantisation(file)
    return _info(
        config,
        source=source,
        path=str(file.path),
        format="gguf",
        parameters=sum(t.count for t in named.values()),
        quantisation=stored,
        file_bytes=file.size,
        tied_embeddings=config["tie_word_embeddings"],
        **_head(file.path, (file.path,), "none"),
        chat_template=isinstance(file.metadata.get("tokenizer.chat_template"), str),
        runs=describe_run(resolve_weights("auto", gguf_llama.ARCHITECTURE), stored),
    )


def _directory(source: str, found: Checkpoint) -> ModelInfo:
    check_supported(found)
    text = tokenizer.from_directory(found.path, found.config)
    config = dict(found.text_config)
    stored = found.quantisation()
    unused = "none"
    if (found.path / checkpoint.SIDECAR).is_file():
        unused = f"{checkpoint.SIDECAR} without {head_file.CONFIG}, not used"
    elif native_head.claims(found):
        unused = "in the model"
    tied = config.get("tie_word_embeddings", found.config.get("tie_word_embeddings"))
    return _info(
        config | {"model_type": found.config["model_type"]},
        source=source,
        path=str(found.path),
        format="safetensors",
        parameters=found.parameters(),
        quantisation=stored,
        file_bytes=sum(f.stat().st_size for f in found.files),
        tied_embeddings=bool(tied) if tied is not None else "output" not in stored,
        **_head(found.path, found.files, unused),
        chat_template=text.has_chat_template,
        runs=describe_run(resolve_weights("auto", found.config["model_type"]), stored),
    )


def _head(path: Path, files: tuple[Path, ...], none: str) -> dict[str, str]:
    """``mtp`` and ``drafts`` of a model; ``none`` is said where no head would be used."""
    beside = head_file.sidecar(path)
    if beside is not None:
        head_file.read_config(beside).check_trunk(beside, files)
        return {"mtp": f"sidecar {checkpoint.SIDECAR}", "drafts": "mtp"}
    folder = head_file.shipped(files)
    if folder is None:
        return {"mtp": none, "drafts": "ngram"}
    return {"mtp": f"{folder.name}, shipped with mtplx", "drafts": "mtp"}


def _info(config: Mapping[str, Any], **known: Any) -> ModelInfo:
    heads = config.get("num_attention_heads")
    return ModelInfo(
        architecture=config["model_type"],
        layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        vocab_size=config.get("vocab_size"),
        context=config.get("max_position_embeddings"),
        **known,
    )
