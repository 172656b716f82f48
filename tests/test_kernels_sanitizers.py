"""The kernels' own test program, built and run under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
TOOLS = [shutil.which(name) for name in ("cmake", "c++", "ninja")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not all(TOOLS), reason="no cmake, ninja or C++ compiler"),
]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    configure = [
        "cmake", "-G", "Ninja", "-S", KERNELS, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Debug",
        "-DMTPLX_CHECK=ON", f"-DMTPLX_SANITIZE={sanitizer}",
    ]  # fmt: skip
    for command in (
        configure,
        ["cmake", "--build", tmp_path, "--target", "kernels_check"],
        [tmp_path / "kernels_check", "3"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("0 failures\n")
