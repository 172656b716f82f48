"""What ``mtplx inspect`` shows: a model's facts, and whether it would load, from headers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplx import checkpoint, fetch, gguf, gguf_llama, head_file, native_head, tokenizer
from mtplx.checkpoint import Checkpoint
from mtplx.errors import ModelError, ModelFileError
from mtplx.families import family_class
from mtplx.families.unused import pattern_of, reason_of, unused
from mtplx.fetch import DEFAULT_MODEL
from mtplx.load import build_trunk, check_supported, describe_run, resolve_weights

NATIVE, TRAINED, NO_HEAD = "native MTP", "MTP head trained by mtplx", "AR only"
BROKEN = "broken"


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model on disk; None where the model does not say."""

    source: str
    path: str
    format: str  # "gguf" or "safetensors"
    architecture: str
    family: str  # the file of ``families`` that knows it; "opaque" for none
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
    mtp: str  # the head that load() would use and where it is, or why there is none
    drafts: str  # "mtp" or "ngram": what drafts by default
    chat_template: bool
    runs: str  # what load() would compute with on this device
    verdict: str  # NATIVE, TRAINED, NO_HEAD or BROKEN
    why: str  # of BROKEN, and of NO_HEAD where a head was to be expected
    broken_tensor: str | None
    mtp_heads: int  # how many, each for a deeper draft
    mtp_files: tuple[str, ...]  # where they are
    tensors: Mapping[str, int]  # stored ones, by what reads them: "trunk", "head", "ignored"
    ignored: Mapping[str, str]  # why, by the pattern of their names

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return dataclasses.asdict(self)


def inspect(model: str | Path = DEFAULT_MODEL) -> ModelInfo:
    """Checks and describes a model: a known name or hub's id (pulled), a directory or a ``.gguf``.

    Nothing is downloaded and no weights are read. A model with tensors that do not fit has the
    verdict BROKEN; raises what ``load`` raises for one that is no model at all, or whose trained
    head is another's.
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
        **_of_trained(file.path, _trained(file.path, (file.path,)), len(file.tensors)),
        chat_template=isinstance(file.metadata.get("tokenizer.chat_template"), str),
        runs=describe_run(resolve_weights("auto", gguf_llama.ARCHITECTURE), stored),
    )


def _directory(source: str, found: Checkpoint) -> ModelInfo:
    check_supported(found)
    text = tokenizer.from_directory(found.path, found.config)
    config = dict(found.text_config)
    stored, beside = found.quantisation(), {tensor.file for tensor in found.sidecar.values()}
    tied = config.get("tie_word_embeddings", found.config.get("tie_word_embeddings"))
    return _info(
        config | {"model_type": found.config["model_type"]},
        source=source,
        path=str(found.path),
        format="safetensors",
        parameters=found.parameters(),
        quantisation=stored,
        file_bytes=sum(f.stat().st_size for f in {*found.files, *beside}),
        tied_embeddings=bool(tied) if tied is not None else "output" not in stored,
        **_account(found),
        chat_template=text.has_chat_template,
        runs=describe_run(resolve_weights("auto", found.config["model_type"]), stored),
    )


def _trained(path: Path, files: tuple[Path, ...]) -> Path | None:
    """Where the head trained by mtplx lies that ``load`` would use; ModelError if another's."""
    beside = head_file.sidecar(path)
    if beside is not None:
        head_file.read_config(beside).check_trunk(beside, files)
    return beside or head_file.shipped(files)


def _told(head: str, where: str, count: int = 1, files: tuple[str, ...] = ()) -> dict[str, Any]:
    """What is told of a head; ``verdict`` NO_HEAD or BROKEN for none."""
    drafts = "mtp" if head in (NATIVE, TRAINED) else "ngram"
    return {
        "verdict": head, "mtp": where, "drafts": drafts, "mtp_heads": count, "mtp_files": files,
        "why": "", "broken_tensor": None, "tensors": {}, "ignored": {},
    }  # fmt: skip


def _of_trained(path: Path, folder: Path | None, trunk: int, none: str = "none") -> dict[str, Any]:
    """What is told of a head that mtplx trained, if any, for a trunk of so many tensors."""
    if folder is None:
        return _told(NO_HEAD, none, 0) | {"tensors": {"trunk": trunk, "head": 0, "ignored": 0}}
    beside, file = folder == head_file.sidecar(path), folder / head_file.WEIGHTS
    where = f"sidecar {file.name}" if beside else f"{folder.name}, shipped with mtplx"
    counts = {"trunk": trunk, "head": len(checkpoint.read_safetensors(file)), "ignored": 0}
    files = (file.name if beside else str(file),)
    return _told(TRAINED, where, files=files) | {"tensors": counts}


def _account(found: Checkpoint) -> dict[str, Any]:
    """What is told of a directory's head, and what becomes of each of its tensors."""
    trained, beside = _trained(found.path, found.files), head_file.sidecar(found.path)
    stored = found.stored
    try:
        own = native_head.claims(found)
        trunk, _ = build_trunk(found)
        chain, note = None, ""
        if beside is None:
            chain, note = native_head.read(trunk, found, float32=False, values=False)
        if chain is None and trained is not None:
            head_file.fit_head(trained, head_file.read_config(trained), trunk)
        layers = int(found.text_config.get("num_hidden_layers") or 0)
        ignored = _ignored(found, trunk, set(own), layers)
    except ModelError as e:
        tensor = e.tensor if isinstance(e, ModelFileError) else None
        return _told(BROKEN, "none", 0) | {"why": str(e), "broken_tensor": tensor}
    if chain is None:
        ignored |= dict.fromkeys(own, "the head that mtplx trained comes first")
    read = len(stored.keys() - ignored.keys() - own.keys())
    if chain is not None:
        files = tuple(sorted({stored[name].file.name for name in own}))
        told = _told(NATIVE, "in " + ", ".join(files), len(chain.heads), files)
        told["tensors"] = {"trunk": read, "head": len(own), "ignored": 0}
    else:
        stray = sorted({tensor.file.name for tensor in found.sidecar.values()} if not own else ())
        none = f"{', '.join(stray)} without {head_file.CONFIG}, not used" if stray else "none"
        told = _of_trained(found.path, trained, read, none)
        told["why"] = "" if trained else note
    told["tensors"]["ignored"] = len(ignored)
    told["ignored"] = {pattern_of(name, layers): why for name, why in sorted(ignored.items())}
    return told


def _ignored(found: Checkpoint, trunk: Any, own: set[str], layers: int) -> dict[str, str]:
    """Why no tensor of these names is read, neither by the trunk nor by its ``own`` head."""
    import mlx.core as mx

    no_head = f"no MTP head is known of a {found.config['model_type']} model"
    ignored = {name: no_head for name in found.sidecar if name not in own}
    if hasattr(trunk, "sanitize"):
        arrays: dict[str, Any] = {}
        for file in sorted({tensor.file for tensor in found.tensors.values()}):
            loaded: Any = mx.load(str(file))  # headers only
            arrays |= loaded
        given = {name: array for name, array in arrays.items() if name not in own}
        for pattern, names in unused(trunk.sanitize, given, layers).items():
            ignored |= dict.fromkeys(names, reason_of(pattern, layers))
    return ignored


def _info(config: Mapping[str, Any], **known: Any) -> ModelInfo:
    heads = config.get("num_attention_heads")
    return ModelInfo(
        architecture=config["model_type"],
        family=family_class(config["model_type"]).__module__.rpartition(".")[2],
        layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        vocab_size=config.get("vocab_size"),
        context=config.get("max_position_embeddings"),
        **known,
    )
