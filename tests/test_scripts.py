"""The scripts' cheap parts, without a network: help, one-line errors, what is to be done."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["demo", "test", "check", "lock"]
TOOLS = ["awk", "bash", "cat", "dirname", "env", "find", "flock", "grep", "mkdir", "rm", "sort"]
TOOLS += ["sha256sum", "shasum", "touch"]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the scripts read, and a PATH that holds no Python and no compiler."""
    copy = tmp_path / "check out"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copytree(ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("build"))
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    return copy


def run(checkout: Path, script: str, *arguments: str, **env: str | None):
    """Run a script (a file, or text that follows the sourced helper) on the bare PATH."""
    values = {"PATH": str(checkout.parent / "bin"), "HOME": str(checkout.parent), **env}
    if (checkout / script.split()[0]).is_file():
        command = [str(checkout / script), *arguments]
    else:
        text = f"set -euo pipefail\nroot={str(checkout)!r}\nsource scripts/_env.sh\n{script}\n"
        command = ["bash", "-c", text]
    return subprocess.run(
        command,
        cwd=checkout,
        env={k: v for k, v in values.items() if v is not None},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def fake(checkout: Path, name: str, text: str) -> Path:
    """Put a program on the bare PATH."""
    path = checkout.parent / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(checkout: Path, refuse: str) -> None:
    """A python3 that fails when one of its arguments matches the pattern."""
    fake(
        checkout,
        "python3",
        f'for a in "$@"; do [[ "$a" =~ {refuse} ]] && exit 1; done\nexec {sys.executable!r} "$@"',
    )


def pretend_installed(checkout: Path) -> None:
    """Leave the stamps of a finished installation, and programs that only say they were called."""
    (checkout / ".venv/bin").mkdir(parents=True)
    for name in ("python", "mtplx"):
        path = checkout / ".venv/bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name}:$PWD:$*"\n')
        path.chmod(0o755)
    done = run(
        checkout, 'mkdir -p "$stamps"; for s in packages mtplx kernels; do mark_done $s; done'
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_explains_and_does_nothing(checkout, script, flag):
    done = run(checkout, f"scripts/{script}", flag, HOME=None)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 1
    assert "#" not in done.stdout
    assert "set -euo" not in done.stdout
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("script", [*(f"scripts/{s}" for s in SCRIPTS), ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / script)]).returncode == 0


def test_no_python(checkout):
    done = run(checkout, "scripts/test")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "mtplx: needs Python 3.11 or newer; none is on PATH "
        "(PYTHON=/path/to/python names another one)"
    ]


def test_old_python(checkout):
    fake(checkout, "python3", "exit 1")
    assert "needs Python 3.11 or newer" in run(checkout, "scripts/test").stderr


def test_python_without_ensurepip_names_the_package(checkout):
    fake_python(checkout, "(ensurepip|^virtualenv$|^pip$)")
    done = run(checkout, "scripts/test")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "mtplx: python3 has no ensurepip, and neither virtualenv nor uv is there: "
        "install the system package python3-venv"
    ]
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("tool", ["virtualenv", "uv"])
def test_without_ensurepip_other_tools_are_used(checkout, tool):
    fake_python(checkout, "(ensurepip|^virtualenv$|^pip$)")
    fake(checkout, tool, 'echo "$0 $*"; exit 3')
    done = run(checkout, "scripts/test")
    assert done.returncode == 1
    assert re.search(rf"bin/{tool} .*/check out/\.venv", done.stderr)
    assert f"no environment could be made in {checkout}/.venv" in done.stderr.splitlines()[-1]


def test_first_run_says_what_is_fetched(checkout):
    fake_python(checkout, "(ensurepip|^virtualenv$|^pip$)")
    fake(checkout, "uv", "exit 3")
    first = run(checkout, "scripts/demo").stderr.splitlines()[0]
    assert re.fullmatch(
        r"mtplx: first run: about \d+ MB of packages and a 93 MB model, about .*; "
        r"later runs need no network",
        first,
    )


def test_nothing_to_do(checkout):
    pretend_installed(checkout)
    done = run(checkout, "scripts/demo", "a prompt", "--seed", "1")
    assert done.stdout == f"mtplx:{checkout}:compare a prompt --seed 1\n"
    assert done.stderr == ""
    done = run(checkout, "scripts/test", "-k", "x")
    assert done.stdout == f"python:{checkout}:-m pytest -k x\n"


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("requirements.lock", "packages"),
        ("pyproject.toml", "mtplx"),
        ("kernels/src/blas.cpp", "kernels"),
        ("scripts/demo", "none"),
    ],
)
def test_a_change_repeats_the_stages_that_depend_on_it(checkout, change, stage):
    pretend_installed(checkout)
    with (checkout / change).open("a") as file:
        file.write("\n# changed\n")
    assert run(checkout, "stage_needed").stdout.strip() == stage


def test_interrupted_or_moved_installations_start_again(checkout):
    pretend_installed(checkout)
    (checkout / ".venv/.mtplx/packages").unlink()
    assert run(checkout, "stage_needed").stdout.strip() == "packages"
    shutil.rmtree(checkout / ".venv")
    pretend_installed(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    assert run(moved, "stage_needed").stdout.strip() == "packages"


def test_no_compiler_is_said_once_and_noticed_when_it_comes(checkout):
    pretend_installed(checkout)
    (checkout / ".venv/.mtplx/kernels").unlink()
    done = run(checkout, "scripts/demo")
    assert done.stderr.splitlines() == [
        "mtplx: no C++ compiler (c++, g++ or clang++): going on without the kernels, "
        "which is slower"
    ]
    assert run(checkout, "scripts/demo").stderr == ""
    fake(checkout, "c++", "exit 1")
    assert run(checkout, "stage_needed").stdout.strip() == "kernels"


def test_a_failed_kernel_build_is_not_fatal(checkout):
    pretend_installed(checkout)
    (checkout / ".venv/.mtplx/kernels").unlink()
    fake(checkout, "c++", "exit 1")
    (checkout / ".venv/bin/python").write_text("#!/usr/bin/env bash\necho broken; exit 1\n")
    done = run(checkout, "scripts/demo")
    assert done.returncode == 0
    assert f"the log is {checkout}/.venv/kernels.log" in done.stderr
    assert (checkout / ".venv/kernels.log").read_text() == "broken\n"
    assert run(checkout, "scripts/demo").stderr == ""


@pytest.mark.parametrize(
    ("home", "message"),
    [(None, "HOME is not set"), ("/dev/null/home", "cannot write to /dev/null")],
)
def test_a_home_that_cannot_hold_the_model(checkout, home, message):
    done = run(checkout, "scripts/demo", HOME=home)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    pretend_installed(checkout)
    cache = str(checkout.parent / "cache/below")
    assert run(checkout, "scripts/demo", HOME=home, MTPLX_CACHE=cache).returncode == 0


def test_the_lock_has_hashes_and_no_addresses():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|--(extra-)?index|--find-links|file:|@ ", text)
    entries = re.split(r"\n(?=[a-z0-9])", text.split("\n", 2)[2])
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==[\w.]+( ; .+)? \\\n", entry), entry[:80]
        assert "--hash=sha256:" in entry
    names = {entry.split("==")[0] for entry in entries}
    assert {"mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "scipy-openblas32", "pytest"} <= names
    assert not names & {"torch", "mlx-cuda-12", "mlx-cuda-13"}
