"""Asks an Optuna sampler for points, over standard input and output: one JSON object a line.

First comes {"sampler": "tpe", "seed": 1, "numbers": 3, "choices": [5]}: how many numeric parameters there are, and how many
choices each categorical one has. Then {"ask": true} is answered by {"u": [...], "choices": [...]}: numbers from 0 to 1, and
indexes. {"tell": 2.5} gives the value of the point that was asked for last; it is answered by {}.
"""
import json
import sys
import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore")

settings = json.loads(sys.stdin.readline())
if settings["sampler"] == "gp":
    import torch

    torch.set_num_threads(1)
    sampler = optuna.samplers.GPSampler(seed=settings["seed"])
else:
    sampler = optuna.samplers.TPESampler(seed=settings["seed"], multivariate=True)
study = optuna.create_study(direction="maximize", sampler=sampler)
print("{}", flush=True)

trial = None
for line in sys.stdin:
    message = json.loads(line)
    if "tell" in message:
        study.tell(trial, message["tell"])
        print("{}", flush=True)
        continue
    trial = study.ask()
    u = [trial.suggest_float(f"x{i}", 0, 1) for i in range(settings["numbers"])]
    choices = [trial.suggest_categorical(f"c{i}", list(range(n))) for i, n in enumerate(settings["choices"])]
    print(json.dumps({"u": u, "choices": choices}), flush=True)
