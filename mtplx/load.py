"""A name or a path -> ``Bundle``: the trunk, its tokenizer and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mtplx import fetch, gguf, gguf_llama, head_file, native, native_head, tokenizer
from mtplx.blas import activate
from mtplx.checkpoint import BITS, GROUP_SIZES, UNREADABLE, Checkpoint, read_checkpoint
from mtplx.errors import ModelError, ModelFileError
from mtplx.fetch import DEFAULT_MODEL
from mtplx.options import WeightsForm
from mtplx.precision import to_float32
from mtplx.provenance import Provenance
from mtplx.strict import load_strictly

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mtplx.mtp_patch import AttachedHead, MTPChain, MTPHead

    Parts = tuple[nn.Module, tokenizer.Tokenizer, Provenance]


@dataclass(frozen=True)
class Bundle:
    """A loaded model: an ``mlx_lm.models.<type>.Model``, an MTP head or None, a tokenizer."""

    trunk: nn.Module
    head: MTPHead | MTPChain | None
    tokenizer: tokenizer.Tokenizer
    provenance: Provenance
    head_source: str | None = None  # the head's directory, "model" for its own, or "given"
    head_note: str = ""  # why there is none, where one was to be expected

    @cached_property
    def attached(self) -> AttachedHead | None:
        """The head on its trunk, attached once (a reduced output head is gathered then)."""
        from mtplx.mtp_patch import attach_head

        if self.head is None:
            return None
        from mtplx import cpu_head

        return cpu_head.fuse(attach_head(self.trunk, self.head))


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    weights: str = "auto",
    head: str | Path | MTPHead | MTPChain | None = "auto",
    any_trunk: bool = False,
) -> Bundle:
    """Loads the default's name, an mlx-lm directory (safetensors), a llama ``.gguf`` or a hub's id.

    ``weights``: "packed" keeps them as stored, "float32" dequantises and widens. "auto" is, where
    the default device is a CPU, as stored and computed by mtplx's own kernels if they are installed
    and have the architecture (``cpu_layers``), else float32 (MLX's packed and 16-bit products are
    slow there); and packed elsewhere. No code that comes with a model is ever run.

    A known name or an id ("org/name", "org/name@revision", see ``hub``) that is not in the cache is
    downloaded first; what is there is used as it is, whatever is newer. A path that exists wins.

    ``head``: a directory with an MTP head, an ``MTPHead``, "none" or None, or "auto": the head that
    was trained for the model and lies in its directory, else the one that the model itself carries
    (``families``), else the one that comes with mtplx for this trunk, else none. The head of
    another trunk is refused unless ``any_trunk``: it could only be slow, never wrong.

    Raises ``ModelError`` (unknown name, unsupported model, another trunk's head),
    ``ModelFileError`` (naming file and tensor), ``FetchError``, and ``ValueError`` for another
    ``weights``.
    """
    activate()  # has an effect only if nothing has imported MLX yet
    forms = get_args(WeightsForm)
    if weights not in forms:
        raise ValueError(f"weights is {weights!r}, not one of {', '.join(forms)}")
    head = _check_head(head)
    path = fetch.resolve(model)
    origin = fetch.origin(model, path)
    checkpoint = read_checkpoint(path) if path.is_dir() else None
    if checkpoint is not None:
        form = resolve_weights(weights, checkpoint.config["model_type"])
        parts = _load_directory(origin, checkpoint, form)
    else:
        form = resolve_weights(weights, gguf_llama.ARCHITECTURE)
        parts = _load_gguf(origin, gguf.read_header(path), form)
    trunk, text, provenance = parts
    if form == "kernels":
        from mtplx import cpu_layers

        cpu_layers.fuse(trunk)
    own, note = None, ""
    if checkpoint is not None and head == "auto" and head_file.sidecar(path) is None:
        own, note = native_head.read(trunk, checkpoint, float32=form != "packed")
    if own is not None:
        return Bundle(trunk, own, text, provenance, "model")
    chosen, source = _choose_head(head, trunk, provenance, any_trunk)
    return Bundle(trunk, chosen, text, provenance, source, "" if chosen else note)


def _check_head(head: Any) -> Any:
    """``load``'s head, as a ``Path`` if it is one; what is wrong shows before the trunk is read."""
    if head is None or head in ("auto", "none"):
        return head
    if isinstance(head, (str, Path)):
        folder = Path(head).expanduser()
        head_file.read_config(folder)
        return folder
    from mtplx.mtp_patch import MTPChain, MTPHead

    if not isinstance(head, MTPHead | MTPChain):
        raise TypeError(f"head is a {type(head).__name__}, not a directory or an MTPHead")
    return head


def _choose_head(
    head: Any, trunk: nn.Module, provenance: Provenance, any_trunk: bool
) -> tuple[MTPHead | MTPChain | None, str | None]:
    """``load``'s head, if it is not the model's own, and where it came from."""
    if head == "auto":
        head = head_file.sidecar(provenance.path) or head_file.shipped(provenance.files)
    if head is None or head == "none":
        return None, None
    if isinstance(head, Path):
        return head_file.read_head(head, trunk, provenance, any_trunk=any_trunk), str(head)
    return head, "given"


def resolve_weights(weights: str, model_type: str | None) -> str:
    """What ``load``'s "auto" means for an architecture on the device that MLX uses by default now.

    "kernels" is as stored, computed by mtplx's own.
    """
    if weights != "auto":
        return weights
    from .device import on_cpu

    if not on_cpu():
        return "packed"
    from mtplx import cpu_layers

    return "kernels" if cpu_layers.serves(model_type) else "float32"


def _load_gguf(source: str, file: gguf.GgufFile, form: str) -> Parts:
    import mlx.core as mx
    from mlx_lm.models import llama

    config = gguf_llama.config(file)
    stored = "float32" if form == "float32" else "packed"
    factors = gguf_llama.rope_factors(file, config)
    text = tokenizer.from_gguf(file, config["vocab_size"])
    model = llama.Model(llama.ModelArgs.from_dict(config))
    arrays: dict[str, mx.array] = {}
    for name, parts in gguf_llama.load_arrays(file, config, stored):
        stem, _, kind = name.rpartition(".")
        for suffix, values in parts.items():
            array = mx.array(values)
            bfloat16 = values.dtype == "uint16"
            arrays[f"{stem}.{kind if suffix == 'weight' else suffix}"] = (
                array.view(mx.bfloat16) if bfloat16 else array
            )
    if stored == "packed":
        config["quantization"] = _quantise(model, arrays)
    if factors is not None:
        _set_rope_factors(model, config, mx.array(factors))
    model.eval()
    load_strictly(model, list(arrays.items()), path=file.path)
    mx.eval(model)  # not its parameters alone: a rope keeps frequencies beside them
    provenance = Provenance(
        source, file.path, (file.path,), "llama", gguf_llama.describe(file),
        describe_run(form, gguf_llama.quantisation(file)),
        sum(t.count for n, t in file.tensors.items() if n != gguf_llama.ROPE_FACTORS), config,
    )  # fmt: skip
    return model, text, provenance


def _quantise(model: nn.Module, arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """Makes the modules with stored scales quantised ones; returns mlx-lm's config entry for it."""
    import mlx.nn as nn

    table: dict[str, Any] = {"group_size": gguf.GROUP_SIZE, "bits": 4}

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        scales = arrays.get(f"{path}.scales")
        if scales is None:
            return False
        words = arrays[f"{path}.weight"].shape[-1]
        bits = words * 32 // (scales.shape[-1] * gguf.GROUP_SIZE)
        table[path] = {"group_size": gguf.GROUP_SIZE, "bits": bits}
        return dict(table[path])

    nn.quantize(model, class_predicate=choose)
    return table


def _set_rope_factors(model: nn.Module, config: dict[str, Any], factors: mx.array) -> None:
    """Divides each rotary frequency by its factor, as Llama 3's scaling does.

    The file holds the factors but not the formula's parameters, so the module's periods are set.
    """
    import mlx.core as mx
    from mlx_lm.models.rope_utils import Llama3RoPE

    dims, base = config["head_dim"], config["rope_theta"]
    rope = Llama3RoPE(dims, base=base, scaling_config={"factor": 1.0})
    rope._freqs = base ** (mx.arange(0, dims, 2) / dims) * factors
    for layer in model.layers:
        layer.self_attn.rope = rope
    config["rope_scaling"] = {"rope_type": "llama3", "factors": gguf_llama.ROPE_FACTORS}


def _load_directory(source: str, checkpoint: Checkpoint, form: str) -> Parts:
    import mlx.core as mx
    from mlx_lm.utils import get_total_parameters

    check_supported(checkpoint)
    text = tokenizer.from_directory(checkpoint.path, checkpoint.config)
    model, config = build_trunk(checkpoint)
    parameters = get_total_parameters(model)
    if form == "float32":
        to_float32(model)
    mx.eval(model)
    provenance = Provenance(
        source, checkpoint.path, checkpoint.files, checkpoint.config["model_type"],
        checkpoint.describe(), describe_run(form, checkpoint.quantisation()), parameters, config,
    )  # fmt: skip
    return model, text, provenance


def build_trunk(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
    """The trunk of a supported directory and mlx-lm's configuration of it; no weights are read yet.

    Raises ``ModelError``, and ``ModelFileError`` naming the tensor that does not fit.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    path = checkpoint.path
    try:
        model, config = load_model(
            path, lazy=True, get_model_classes=partial(_checked_classes, checkpoint)
        )
        # Traced and not computed: shows what config.json says that no layer can run with.
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    except ModelError:
        raise
    except Exception as e:  # model classes fail in any way on a configuration that is not theirs
        if isinstance(e, KeyError) and "." in str(e):  # mlx-lm took a tensor for granted
            what = f"{path}: tensor {e} is missing"
            raise ModelFileError(what, path=path, tensor=e.args[0]) from None
        why = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
        raise ModelFileError(
            f"{path}: {checkpoint.config['model_type']} model cannot be built from its config.json"
            f" and weights ({why})", path=path,
        ) from e  # fmt: skip
    del model.load_weights, model.sanitize  # the checks set by _checked_classes
    return model, config


def check_supported(checkpoint: Checkpoint) -> None:
    """Raises ``ModelError`` unless mlx-lm has a class for the configuration, MLX for the types."""
    from mlx_lm.utils import _get_classes

    for name, tensor in {**checkpoint.tensors, **checkpoint.sidecar}.items():
        if tensor.dtype in UNREADABLE and tensor.file in checkpoint.files:
            raise ModelError(
                f"{tensor.file}: tensor {name!r} is stored as {tensor.dtype} (NVFP4 has such),"
                " which MLX does not read"
            )
    try:
        _get_classes(dict(checkpoint.config))
    except (ValueError, AttributeError) as e:
        code = checkpoint.config.get("auto_map")
        why = " (it brings code of its own, auto_map, which mtplx never runs)" if code else ""
        raise ModelError(
            f"{checkpoint.path}: mlx-lm has no model type {checkpoint.config['model_type']!r}{why}"
        ) from e


def _checked_classes(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's hook: its own classes, with this instance's weights compared before they go in."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    of_head = native_head.claims(checkpoint)

    def build(args: Any) -> nn.Module:
        model = model_class(args)
        clean, original = getattr(model, "sanitize", dict), model.load_weights

        def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = clean({k: v for k, v in weights.items() if k not in of_head})
            _check_packed(model, weights, checkpoint)
            return weights

        def load_weights(items: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
            return load_strictly(model, items, checkpoint=checkpoint, into=original)

        model.sanitize, model.load_weights = sanitize, load_weights
        return model

    return build, args_class


def _check_packed(
    model: nn.Module, weights: Mapping[str, mx.array], checkpoint: Checkpoint
) -> None:
    """Packed tensors fit their modules: MLX divides by these sizes in native code."""
    from mlx.utils import tree_flatten

    parameters: dict[str, Any] = dict(tree_flatten(model.parameters()))
    for name, parameter in parameters.items():
        stem = name.removesuffix(".weight")
        words, axis, per_column = weights.get(name), -1, 32
        if words is None:  # AWQ: 4-bit words of shape (columns, rows / 8), scales (groups, rows)
            words, axis, per_column = weights.get(f"{stem}.qweight"), 0, 4
        scales, columns = weights.get(f"{stem}.scales"), parameter.shape[-1]
        if stem == name or words is None or scales is None:
            continue
        bits = words.shape[axis] * per_column / columns if words.ndim else 0
        groups = scales.shape[axis] if scales.ndim else 0
        if bits not in BITS or columns not in [groups * size for size in GROUP_SIZES]:
            stored = checkpoint.tensors.get(name)
            where = stored.file if stored else checkpoint.path
            raise ModelFileError(
                f"{where}: tensor {name!r} of shape {words.shape} with scales {scales.shape} does "
                f"not pack rows of {columns}", path=where, tensor=name,
            )  # fmt: skip


def describe_run(form: str, stored: Mapping[str, str]) -> str:
    """What computes, given the ``weights`` form and the stored types by group of tensors."""
    kind = stored.get("layers", "F32")
    floats = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if form == "packed":
        return f"{floats.get(kind, kind + ' packed')}, as stored"
    if form == "kernels":
        return f"{floats.get(kind, kind + ' packed')}, as stored; {native.describe()}"
    how = "dequantised" if kind not in floats else "as stored" if kind == "F32" else "widened"
    from .device import on_cpu

    without = on_cpu() and native.status().native is None
    return f"float32, {how}" + (f"; {native.describe()}" if without else "")
