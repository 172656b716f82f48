"""The kernels' own test program, built and run under the sanitizers, and for 64-bit ARM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
TOOLS = [shutil.which(name) for name in ("cmake", "c++", "ninja")]
ARM_TOOLS = [shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not all(TOOLS), reason="no cmake, ninja or C++ compiler"),
]


def build_and_run(folder: Path, *options: str, emulator: str | None = None) -> str:
    """What the program says, run with 3 threads."""
    program = [folder / "kernels_check", "3"]
    for command in (
        ["cmake", "-G", "Ninja", "-S", KERNELS, "-B", folder, "-DMTPLX_CHECK=ON", *options],
        ["cmake", "--build", folder, "--target", "kernels_check"],
        program if emulator is None else [emulator, *program],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DMTPLX_SANITIZE={sanitizer}"]
    assert build_and_run(tmp_path, *options).endswith(" 0 failures\n")


@pytest.mark.skipif(not all(ARM_TOOLS), reason="no cross compiler or emulator for 64-bit ARM")
def test_the_neon_level_is_right_where_it_is_emulated(tmp_path: Path) -> None:
    options = [
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", "-DCMAKE_EXE_LINKER_FLAGS=-static",
    ]  # fmt: skip
    said = build_and_run(tmp_path, *options, emulator="qemu-aarch64")
    assert said == "neon portable levels, 0 failures\n"
