#!/usr/bin/env python3
"""Records what a client of a real vLLM sees: answers, metrics, log lines, flags, and argparse's messages about wrong flags.

usage: record.py VENV MODEL PACKAGE VERSION [commands] [server]

VENV is the virtual environment that setup.sh made, MODEL its tiny model, and PACKAGE the folder serverctl/sim. What the
simulator itself needs goes to versions/VERSION there (the flags) and to vllm/versions/VERSION (the help and the metrics).
What its tests compare it with goes to testdata/recordings/VERSION (the command lines) and to
vllm/testdata/recordings/VERSION (the rest).
Each of the two parts takes about a minute of CPU time. Afterwards no server runs any more. The script needs only the standard
library. It passes PYTHONPATH on, so that the sources of another version may replace the installed ones.
"""

import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

# The args of the server. The context is short, so that a prompt beyond it is short too.
SERVE = ["--served-model-name", "tiny", "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
         "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--api-key", "key", "--host", "127.0.0.1"]
START_SECONDS = 600
ANSWER_SECONDS = 120
STOP_SECONDS = 60

# Command lines that argparse ends, after `vllm serve`.
COMMANDS = [
    ["--help"], ["--help=all"], ["--help=CacheConfig"], ["--help=max-num"], ["--help=zzz"], ["-h"],
    ["m", "--no-such-flag"], ["m", "--no-such-flag=1", "more"], ["m", "n"],
    ["m", "--max-num-seqs", "abc"], ["m", "--max-num-seqs"], ["m", "--max-num-seqs=1.5"], ["m", "--max-num-seqs", "--port", "1"],
    ["m", "--max-num", "8"], ["m", "--max-num-batched-tokens", "1.5K"], ["m", "--max-num-batched-tokens", "abc"],
    ["m", "--max-model-len", "abc"], ["m", "--kv-cache-dtype", "fp9"],
    ["m", "--gpu-memory-utilization", "abc"], ["m", "--port", "abc"], ["m", "--block-size", "7"], ["m", "--block-size", "abc"],
    ["m", "--enable-prefix-caching", "true"], ["m", "--enable-prefix-caching=true"], ["m", "--scheduling-policy", "x"],
    ["m", "--speculative-config", "{"], ["m", "--swap-space", "abc"], ["m", "--seed", "x"], ["m", "-tp", "x"], ["m", "-xyz"],
    ["m", "--uvicorn-log-level", "x"], ["m", "--dtype", "x"],
    ["m", "--disable-log-requests", "--max-num-seqs", "x"],
    ["m", "--max-num-partial-prefills", "1", "--max-num-seqs", "x"],
]

# Runs in the environment's own interpreter. It imports vLLM once, parses all command lines, and prints the parser's actions.
PLAY = r'''
import argparse, contextlib, io, json, os, sys
os.environ["COLUMNS"] = "80"
commands = json.loads(sys.argv[1])
import vllm.entrypoints.cli.main as cli
from vllm.utils import argparse_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser
played = []
for words in commands:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["vllm", "serve", *words]
    FlexibleArgumentParser._search_keyword = None
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as e:
            code = e.code
        except BaseException as e:
            err.write(f"{type(e).__name__}: {e}\n")
            code = 1
    played.append({"args": words, "code": code, "stdout": out.getvalue(), "stderr": err.getvalue()})

from vllm.entrypoints.cli.serve import ServeSubcommand
try:
    root = FlexibleArgumentParser(description="vLLM CLI")
    parser = ServeSubcommand().subparser_init(root.add_subparsers(required=False, dest="subparser"))
except TypeError:
    parser = ServeSubcommand.subparser_init(root.add_subparsers(required=False, dest="subparser"))
def refusal(name):
    """Returns the parser's complaint about the value abc; None when it accepts the value."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            parser.parse_args(["m", name, "abc"])
        except SystemExit:
            return err.getvalue().strip().splitlines()[-1].split("error: ", 1)[-1]
        except BaseException as e:
            return f"{type(e).__name__}: {e}"
flags = []
registered = {}
for name, action in parser._option_string_actions.items():
    registered.setdefault(id(action), []).append(name)
for group in parser._action_groups:
    for a in group._group_actions:
        if a.option_strings:
            flags.append({"group": group.title, "names": a.option_strings, "accepted": sorted(registered[id(a)]), "dest": a.dest,
                "nargs": a.nargs if a.nargs is None or isinstance(a.nargs, int) else str(a.nargs), "action": type(a).__name__,
                "choices": None if a.choices is None else [str(c) for c in a.choices],
                "default": None if a.default is None or a.default is argparse.SUPPRESS else repr(a.default),
                "refusal": None if a.nargs == 0 else refusal(a.option_strings[0])})
json.dump({"commands": played, "flags": flags}, sys.__stdout__)
'''


def say(text):
    print("record.py:", text, file=sys.stderr)


def environment():
    env = dict(os.environ, NO_COLOR="1", PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", COLUMNS="80",
               VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    return env


def record_commands(venv, out, flags, version):
    done = subprocess.run([venv / "bin/python", "-c", PLAY, json.dumps(COMMANDS)], env=environment(), capture_output=True, text=True,
                          timeout=START_SECONDS)
    if done.returncode != 0:
        sys.exit(f"record.py: the parser could not be asked: {done.stderr[-2000:]}")
    said = json.loads(done.stdout[done.stdout.index('{"commands"'):])
    for played in said["commands"]:
        name = {"--help": "help.txt", "--help=all": "help-all.txt"}.get(played["args"][0])
        if name:
            (version / name).write_text(played["stdout"])
            played["stdout"] = "see " + name
    write_json(out / "commands.json", said["commands"])
    with open(flags / "flags.json", "w") as f: # a line each: most of it is one word
        f.write("[\n" + ",\n".join(json.dumps(flag) for flag in said["flags"]) + "\n]\n")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def masked(text, masks):
    for secret, shown in masks:
        text = text.replace(secret, shown)
    return text


def masks(venv, model):
    """Returns the paths of this machine in answers and logs, each with its replacement in the recordings."""
    paths = [str(p) for p in venv.glob("lib/python*/site-packages")] + os.environ.get("PYTHONPATH", "").split(":")
    return [(p, "/usr/local/lib/python3.12/dist-packages") for p in paths if p] + [
        (str(model), "/models/tiny"), (str(venv), "/venv"), (str(pathlib.Path.home()), "/home/user")]


def trim(log, masks):
    """Keeps the log lines of a server's start and of its end."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    ready = next(i for i, line in enumerate(lines) if "Application startup complete" in line)
    end = max((i for i, line in enumerate(lines) if "] Shutting down FastAPI" in line or "shutdown triggered" in line), default=len(lines))
    log.write_text(masked("".join(lines[:ready + 1] + lines[end:]), masks))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, r):
    """Sends one request unchanged, and returns the answer with its body as text."""
    headers = {"Authorization": "Bearer key"}
    body = r.get("body")
    if body is not None and not isinstance(body, str):
        body = json.dumps(body)
    if body is not None:
        headers["Content-Type"] = "application/json"
    for name, value in r.get("headers", {}).items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        c.request(r["method"], r["path"], body=body, headers=headers)
        a = c.getresponse()
        return {"name": r["name"], "status": a.status, "type": a.getheader("Content-Type"), "body": a.read().decode()}
    finally:
        c.close()


def record_server(venv, model, requests, out, version):
    port = free_port()
    args = [str(venv / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--port", str(port)]
    say(" ".join(args))
    with open(out / "server.log", "wb") as log:
        server = subprocess.Popen(args, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_ready(server, port)
            answers = []
            for r in requests:
                if r["name"].startswith("metrics"):
                    text = ask(port, r)["body"]
                    (out / (r["name"] + ".txt")).write_text(text)
                    (version / "metrics.txt").write_text(metrics_of(text))
                    continue
                try:
                    answers.append(ask(port, r))
                except Exception as e:
                    answers.append({"name": r["name"], "error": repr(e)})
            lines = "[\n" + ",\n".join(json.dumps(a, ensure_ascii=False) for a in answers) + "\n]\n"
            (out / "answers.json").write_text(masked(lines, masks(venv, model)))
            server.send_signal(signal.SIGTERM)
            say(f"exit code {server.wait(STOP_SECONDS)}")
        finally:
            try:
                os.killpg(server.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            server.wait()
    trim(out / "server.log", masks(venv, model))


def metrics_of(text):
    """Returns vLLM's own metrics without their values. Settings that only a CPU has get their values on a GPU."""
    own = [line for line in text.splitlines() if not re.match("(# HELP |# TYPE )?(python_|process_|http_)", line)]
    lines = [line if line.startswith("#") else line[:line.rindex("}") + 1] for line in own]
    on_gpu = re.compile('(kv_cache_memory_bytes|cpu_kvcache_space_bytes)="[0-9]+"')
    return "".join(on_gpu.sub(r'\1="None"', line).replace('mamba_ssm_cache_dtype="float32"', 'mamba_ssm_cache_dtype="auto"') + "\n"
                   for line in lines)


def wait_ready(server, port):
    for _ in range(START_SECONDS * 2):
        if server.poll() is not None:
            sys.exit(f"record.py: the server ended with {server.returncode}; see server.log")
        try:
            if ask(port, {"name": "", "method": "GET", "path": "/health"})["status"] == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    sys.exit("record.py: the server is not ready")


def main():
    venv, model, package = (pathlib.Path(p).absolute() for p in sys.argv[1:4])
    recordings = package / "vllm/testdata/recordings"
    out, version = recordings / sys.argv[4], package / "vllm/versions" / sys.argv[4]
    commands, flags = package / "testdata/recordings" / sys.argv[4], package / "versions" / sys.argv[4]
    parts = sys.argv[5:] or ["commands", "server"]
    for folder in out, version, commands, flags:
        folder.mkdir(parents=True, exist_ok=True)
    if "commands" in parts:
        record_commands(venv, commands, flags, version)
    if "server" in parts:
        record_server(venv, model, json.loads((recordings / "requests.json").read_text()), out, version)


if __name__ == "__main__":
    main()
