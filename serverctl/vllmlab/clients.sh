#!/bin/bash
# Installs programs that others wrote: the OpenAI client and GuideLLM, to be tried on the simulated server, and Optuna with its
# dashboard, which read exported studies. From the Python package registry, with Python 3.12; 6 GB on disk, for GuideLLM brings torch.
# Nothing the second time.
#
# usage: [PY=/path/to/python3.12] clients.sh [DIR]
#
# DIR is ${XDG_CACHE_HOME:-~/.cache}/tuner-clients unless given. Prints PYTHON=… on standard output, all else on standard error.
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
  rm -f ok-* # of another recipe
  python=$(find_python)
  uv=$(find_uv "$python")
  say "installing ${PACKAGES[*]} into $DIR"
  limited 60 "making a virtual environment" "$uv" venv -q --allow-existing --python "$python" venv
  limited 900 "installing ${PACKAGES[*]}" "$uv" pip install -q --python venv/bin/python "${PACKAGES[@]}"
  limited 300 "making a tokenizer" venv/bin/python "$HERE/make_model.py" tokenizer
  touch "$STAMP"
fi
echo "PYTHON=$DIR/venv/bin/python"
