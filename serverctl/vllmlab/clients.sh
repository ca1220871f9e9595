#!/bin/bash
# Installs programs of other projects: the OpenAI client and GuideLLM, to test the simulated server, and Optuna with its dashboard, to
# read exported studies. They come from the Python package registry and need Python 3.12. GuideLLM needs torch, so all take 6 GB on disk.
# A second call installs nothing.
#
# usage: [PY=/path/to/python3.12] clients.sh [DIR]
#
# DIR is ${XDG_CACHE_HOME:-~/.cache}/tuner-clients by default. The script prints PYTHON=… on standard output, and messages on standard
# error.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/tuner-clients}
PACKAGES=(openai==3.54.0 guidellm==0.8.1 optuna==5.0.0 optuna-dashboard==0.21.0)
STAMP=ok-recipe-2

. "$HERE/lib.sh"

mkdir -p "$DIR"
cd "$DIR"
DIR=$PWD
alone
if [ ! -f "$STAMP" ]; then
  rm -f ok-* # stamps of other recipes
  python=$(find_python)
  uv=$(find_uv "$python")
  say "installing ${PACKAGES[*]} into $DIR"
  limited 60 "making a virtual environment" "$uv" venv -q --allow-existing --python "$python" venv
  limited 900 "installing ${PACKAGES[*]}" "$uv" pip install -q --python venv/bin/python "${PACKAGES[@]}"
  limited 300 "making a tokenizer" venv/bin/python "$HERE/make_model.py" tokenizer
  touch "$STAMP"
fi
echo "PYTHON=$DIR/venv/bin/python"
