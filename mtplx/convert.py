"""``mtplx convert``: an MLX conversion that keeps the MTP head where stock mlx-lm ignores it.

The trunk goes through mlx-lm's own conversion. The head, which mlx-lm drops, goes into a file of
its own, ``mtp.safetensors``, under its family's names: mlx-lm reads ``model*.safetensors`` only.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fetch, head_file, native_head, tokenizer
from .blas import activate
from .checkpoint import BITS, HEAD_CONFIG, SIDECAR, Checkpoint, read_checkpoint
from .errors import ModelError, RequestError
from .load import build_trunk, check_supported

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from .families.head import MTPChain

GROUP_SIZES = (32, 64, 128)  # of MLX's affine packing
DTYPES = ("float16", "bfloat16", "float32")
_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py", "LICENSE*")
# What tells of the files that are left behind.
_NOT_COPIED = ("config.json", "*.index.json", HEAD_CONFIG, "hf_quant_config.json")
_ROOM = 16 << 20  # bytes for what is no weights


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` wrote.  heads: of the chain in it.  note: why there are none, else ""."""

    path: Path
    heads: int
    note: str


def convert(
    model: str | Path,
    out: str | Path,
    *,
    bits: int | None = None,
    group_size: int = 64,
    head_bits: int | None = None,
    dtype: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Converts a directory as its makers publish it into one that mtplx and stock mlx-lm load.

    bits: packs the matrices of trunk and head in groups of ``group_size``, as mlx-lm does; None
    leaves them as they are.  head_bits: the head's own.  dtype: of what is not packed, "float16",
    "bfloat16" or "float32"; None is what config.json says, else as stored.  on_progress: called
    with (bytes written, bytes in all), from another thread.

    ``out`` appears when it is whole. A head that mtplx trained (``mtp_config.json``) is not taken
    along: it names the trunk's files, and the new ones are others. Raises ``RequestError`` for an
    ``out`` that is there already or packing that cannot be, what ``load`` raises, and
    ``ModelError`` where the disk has no room.
    """
    out = Path(out).expanduser().absolute()
    _check_request(out, bits, group_size, head_bits, dtype)
    activate()  # has an effect only if nothing has imported MLX yet
    path = fetch.resolve(model)
    if not path.is_dir():
        raise RequestError(f"{path}: a directory with safetensors weights is converted, no .gguf")
    checkpoint = read_checkpoint(path)
    check_supported(checkpoint)
    tokenizer.from_directory(path, checkpoint.config)  # without one, load would refuse the result
    trunk, config = build_trunk(checkpoint)
    head, note = native_head.read(trunk, checkpoint, float32=False)
    for part in (trunk, head):
        if part is not None:
            _cast(part, _dtype(dtype, checkpoint), trunk)
    _tell_dtype(config, dtype)
    if bits is not None:
        config = _pack_trunk(trunk, config, bits, group_size)
    stored: dict[str, mx.array] = {}
    if head is not None:
        if packed := head_bits or bits:
            _pack(head, packed, group_size, trunk)
        stored = _by_stored_names(head, config, checkpoint)
    _write(out, trunk, stored, config, path, on_progress)
    if (trained := head_file.sidecar(path)) is not None:
        note = (
            f"the head that mtplx trained is not taken along: it names the files of {trained} as"
            f" its trunk. `--head {trained} --any-trunk` uses it with the converted model"
        )
    return Conversion(out, len(head.heads) if head else 0, note or ("" if head else _NO_HEAD))


_NO_HEAD = "the checkpoint has no MTP head"


def _check_request(
    out: Path, bits: int | None, group_size: int, head_bits: int | None, dtype: str | None
) -> None:
    for name, value, allowed in (
        ("bits", bits, (None, *BITS)), ("head_bits", head_bits, (None, *BITS)),
        ("group_size", group_size, GROUP_SIZES), ("dtype", dtype, (None, *DTYPES)),
    ):  # fmt: skip
        if value not in allowed:
            names = ", ".join(str(each) for each in allowed if each is not None)
            raise RequestError(f"{name} must be one of {names}, not {value!r}")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RequestError(f"{out} is no directory")
    if out.is_dir() and any(out.iterdir()):
        raise RequestError(f"{out} is there already and not empty")


# --- what the weights become ---


def _dtype(asked: str | None, checkpoint: Checkpoint) -> mx.Dtype | None:
    """As mlx-lm chooses it; newer configurations say "dtype" where older say "torch_dtype"."""
    import mlx.core as mx

    parts = (checkpoint.config, checkpoint.text_config)
    told = [asked, *(part.get(key) for part in parts for key in ("torch_dtype", "dtype"))]
    return next((getattr(mx, name) for name in told if name in DTYPES), None)


def _tell_dtype(config: dict[str, Any], asked: str | None) -> None:
    """Put a type that was asked for where config.json tells of one."""
    for part in (config, config.get("text_config")):
        for key in ("torch_dtype", "dtype"):
            if asked and isinstance(part, dict) and key in part:
                part[key] = asked


def _cast(module: nn.Module, dtype: mx.Dtype | None, trunk: Any) -> None:
    """Floating-point weights become ``dtype``, but for those that mlx-lm keeps in the trunk."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    wanted = getattr(trunk, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        if dtype is None or not mx.issubdtype(value.dtype, mx.floating) or not wanted(path):
            return value
        return value.astype(dtype)

    module.update(tree_map_with_path(cast, module.parameters()))


def _choice(trunk: Any, group_size: int) -> Callable[[str, Any], bool | dict[str, Any]]:
    """How mlx-lm packs a module of this trunk, with groups that its rows can be cut into."""
    chosen = getattr(trunk, "quant_predicate", None) or (lambda path, module: True)

    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        how = chosen(path, module)
        if isinstance(how, dict) and module.weight.shape[-1] % how.get("group_size", 64):
            return {**how, "group_size": group_size}
        return how

    return choose


def _pack_trunk(
    trunk: nn.Module, config: dict[str, Any], bits: int, group_size: int
) -> dict[str, Any]:
    """Packs a trunk; the configuration that says so."""
    from mlx_lm.utils import quantize_model

    if "quantization" in config:
        raise RequestError("the model is packed already: bits are for one that is not")
    with redirect_stdout(io.StringIO()):  # it prints
        return quantize_model(
            trunk, config, group_size, bits, quant_predicate=_choice(trunk, group_size)
        )[1]


def _pack(head: MTPChain, bits: int, group_size: int, trunk: Any) -> None:
    import mlx.nn as nn

    if any(hasattr(module, "bits") for _, module in head.named_modules()):
        raise RequestError("the MTP head is packed already: bits are for one that is not")
    nn.quantize(head, group_size, bits, class_predicate=_choice(trunk, group_size))


def _by_stored_names(
    head: MTPChain, config: dict[str, Any], checkpoint: Checkpoint
) -> dict[str, mx.array]:
    """The head's tensors by their family's names.

    How its packed modules are packed is told in ``config`` where that is not what a reader takes
    for granted; mlx-lm looks there for the trunk's modules only.
    """
    from mlx.utils import tree_flatten

    from .families import family_class
    from .families.native import NativeFamily

    family = family_class(checkpoint.config["model_type"])
    assert issubclass(family, NativeFamily)
    for path, module in head.named_modules():
        if hasattr(module, "bits"):
            how = {key: getattr(module, key) for key in ("group_size", "bits", "mode")}
            if how["mode"] != "affine":
                config.setdefault("quantization", dict(how))
            told = config.get("quantization", {"mode": "affine"})
            stem = family.stored_name(f"{path}.weight", checkpoint.text_config)
            if how != {key: told.get(key, value) for key, value in how.items()}:
                told[stem.removesuffix(".weight")] = how
    parameters: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    text = checkpoint.text_config
    named = {family.stored_name(place, text): value for place, value in parameters.items()}
    assert len(named) == len(parameters)
    # A name without a place is the trunk's tensor, which the family puts into the head again.
    return {name: value for name, value in named.items() if family.place(name, text) is not None}


# --- writing ---


def _write(
    out: Path, trunk: Any, head: dict[str, mx.array], config: dict[str, Any], source: Path,
    on_progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """config.json comes last: without it, no directory is a model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import save_config, save_model

    from . import __version__

    arrays: dict[str, mx.array] = dict(tree_flatten(trunk.parameters()))
    need = sum(array.nbytes for array in (*arrays.values(), *head.values()))
    del arrays
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < need + _ROOM:
        raise ModelError(
            f"{out}: {need / 1e9:.2f} GB would be written, and {free / 1e9:.2f} GB are free there"
        )
    if "quantization" not in config and _is_fp8(config):
        del config["quantization_config"]  # mlx-lm has made bfloat16 of it
    keep = "vision_tower" in getattr(trunk, "model", {})
    with _appearing(out) as folder:
        try:
            with _watched(folder, need, on_progress):
                save_model(folder, trunk, donate_model=True)
                if head:
                    about = {"format": "mlx", "mtplx": __version__}
                    mx.save_safetensors(str(folder / SIDECAR), head, about)
        except RuntimeError as e:  # MLX's, of a file that it cannot write or read
            raise ModelError(f"{out}: cannot be written ({e})") from e
        _copy_rest(source, folder)
        save_config(config, folder / "config.json", keep_vision_config=keep)
        written = read_checkpoint(folder)  # whole, as far as names and shapes tell
        native_head.read(build_trunk(written)[0], written, float32=False, values=False)


def _is_fp8(config: dict[str, Any]) -> bool:
    return (config.get("quantization_config") or {}).get("quant_method") == "fp8"


def _copy_rest(source: Path, folder: Path) -> None:
    """The tokenizer's files, and whatever else is small and no weights."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file() and not any(file.match(each) for each in _NOT_COPIED):
                shutil.copyfile(file, folder / file.name)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes ``out`` at the end: whole, or not at all."""
    temporary = out.with_name(f".partial-{os.getpid()}-{out.name}")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _watched(
    folder: Path, total: int, on_progress: Callable[[int, int], None] | None
) -> Iterator[None]:
    """Tells how much is written so far while MLX writes."""
    if on_progress is None:
        yield
        return
    report, done = on_progress, threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            report(min(total, sum(file.stat().st_size for file in folder.iterdir())), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    report(total, total)
