"""What mtplx is measured against on a CPU, each in a process of its own that waits for requests.

mlx-lm as it is installed: the model's own quantised weights, MLX's operations, the BLAS that came
with MLX. llama.cpp through ``llama-cpp-python``, if that is installed, on the same file. A process
reads one JSON object a line and answers with one: {"do": name, ...} -> {"seconds": ...}.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from ..blas import activate, thread_count
from ..errors import MtplxError

__all__ = ["Peer", "llama_cpp", "mlx_lm", "own_memory", "serve_llama_cpp", "serve_mlx_lm"]

_TOP_K, _TOP_P = 20, 0.95
_CONTEXT = 2048
Handler = Callable[..., dict[str, Any]]


class Peer:
    """A process that decodes on request; ``MtplxError`` with its last words if it ends."""

    def __init__(self, function: str, *arguments: str):
        program = f"import sys; from mtplx.bench import peers; peers.{function}(*sys.argv[1:])"
        self._errors = TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads may fill up)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.about = self._read()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why it has ended is on its stderr
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.communicate()
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines()
        raise MtplxError(words[-1] if words else f"ended with {self._process.returncode}")


def mlx_lm(model: Path) -> Peer:
    """mlx-lm as it is installed."""
    return Peer("serve_mlx_lm", str(model))


def llama_cpp(model: Path) -> Peer:
    """llama.cpp; ``MtplxError`` says why not."""
    if find_spec("llama_cpp") is None:
        raise MtplxError("llama-cpp-python is not installed")
    if model.suffix != ".gguf":
        raise MtplxError(f"llama.cpp reads .gguf files, not {model.name}")
    return Peer("serve_llama_cpp", str(model))


def own_memory(model: Path, head: str, blas: str) -> dict[str, Any]:
    """Peak bytes of a run and of its imports, above those of an interpreter with MLX loaded.

    Under "peak", "imports" and "mlx".
    """
    peer = Peer("serve_memory", str(model), head, blas)
    peer.close()
    return peer.about


# --- inside the processes -----------------------------------------------------------------------


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _serve(about: dict[str, Any], handlers: dict[str, Handler]) -> None:
    _answer(about)
    for line in sys.stdin:
        request = json.loads(line)
        _answer(handlers[request.pop("do")](**request))


def _timed(tokens: Any, count: int) -> dict[str, Any]:
    """Seconds from the first of ``count`` tokens to the last, the prompt excluded."""
    times = []
    for _, _ in zip(range(count), tokens, strict=False):
        times.append(perf_counter())
    return {"tokens": len(times) - 1, "seconds": times[-1] - times[0]}


def serve_mlx_lm(model: str) -> None:
    """mlx-lm's ``generate_step`` and sampler."""
    activate("reference")
    sys.modules["mtplx_kernels"] = None  # type: ignore[assignment]  # as if it were not installed
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load_model

    from ..load import load

    path = Path(model)
    trunk: Any = (
        load_model(path)[0] if path.is_dir() else load(path, weights="packed", head="none").trunk
    )
    for name, module in trunk.named_modules():
        home = type(module).__module__
        if not home.startswith(("mlx.", "mlx_lm.")):
            raise MtplxError(f"{name} is {home}'s: this would not be mlx-lm as it is installed")
    packed = any(isinstance(m, nn.QuantizedLinear) for _, m in trunk.named_modules())

    def decode(prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        sampler = make_sampler(temperature, top_p=_TOP_P, top_k=_TOP_K)
        out = generate_step(mx.array(prompt), trunk, max_tokens=tokens, sampler=sampler)
        return _timed(out, tokens)

    _serve({"name": "mlx-lm", "packed": packed}, {"decode": decode})


def serve_llama_cpp(model: str) -> None:
    """llama.cpp's own sampler for decoding, and bare forwards."""
    llama_cpp = import_module("llama_cpp")
    threads = thread_count()
    options = {"n_ctx": _CONTEXT, "n_batch": 512, "n_threads": threads, "n_threads_batch": threads}
    decoder = llama_cpp.Llama(model, verbose=False, **options)
    judge = llama_cpp.Llama(model, verbose=False, logits_all=True, **options)

    def decode(prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        decoder.reset()
        law = {"temp": temperature, "top_k": _TOP_K, "top_p": _TOP_P, "min_p": 0.0}
        return _timed(decoder.generate(prompt, repeat_penalty=1.0, **law), tokens)

    def prefill(ids: list[int]) -> dict[str, Any]:
        decoder.reset()
        begin = perf_counter()
        decoder.eval(ids)
        return {"seconds": perf_counter() - begin}

    def context(ids: list[int]) -> dict[str, Any]:
        judge.reset()
        judge.eval(ids)
        return {}

    def forward(ids: list[int]) -> dict[str, Any]:
        """Logits of every row; then back to the context."""
        length = judge.n_tokens
        begin = perf_counter()
        judge.eval(ids)
        seconds = perf_counter() - begin
        judge.n_tokens = length  # the next eval takes what is behind out of the cache
        return {"seconds": seconds}

    handlers: dict[str, Handler] = {
        "decode": decode, "prefill": prefill, "context": context, "forward": forward,
    }  # fmt: skip
    version = getattr(llama_cpp, "__version__", "unknown")
    _serve({"name": "llama.cpp", "version": version, "threads": threads}, handlers)


def serve_memory(model: str, head: str, blas: str) -> None:
    """Load and decode 64 tokens of an answer with drafts, as ``mtplx generate`` does."""
    activate(blas)  # type: ignore[arg-type]
    import mlx.core as mx

    mx.eval(mx.ones(8) + 1)
    before = _peak_bytes()
    from ..api import generate
    from ..load import load

    import_module("mlx_lm.models.llama")  # loading a model imports it, and much with it
    imports = _peak_bytes() - before
    bundle = load(model, head=head, any_trunk=True)
    generate(bundle, "Name three rivers, and say where they end.", max_tokens=64, seed=1)
    _answer({"peak": _peak_bytes() - before, "imports": imports, "mlx": before})


def _peak_bytes() -> int:
    """The most memory that this process has had resident.

    Linux carries ``ru_maxrss`` over from the parent, where it is larger, so it is not asked there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = [ln for ln in status.read_text().splitlines() if ln.startswith("VmHWM:")]
        return int(lines[0].split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most)  # bytes on macOS
