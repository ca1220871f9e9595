#!/usr/bin/env python3
"""Chooses the points of a study with Optuna: docs/study-file.md#sampler-ask has the protocol. Needs `pip install optuna`.

Each line of standard input is one JSON object, and so is each answer on standard output. Everything that Optuna knows comes from the
lines with the key tell, so an interrupted study goes on: the tuner then tells all trials again.
"""

import json
import sys
import zlib

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial


def distribution(p):
    """Returns a parameter as Optuna has it. Optuna has no steps on a logarithmic scale; the tuner moves a number to the nearest step."""
    if p["kind"] == "float":
        return FloatDistribution(p["low"], p["high"], log=p.get("log", False), step=None if p.get("log") else p.get("step"))
    if p["kind"] == "int":
        log = p.get("log", False)
        return IntDistribution(int(p["low"]), int(p["high"]), log=log, step=1 if log else int(p.get("step", 1)))
    return CategoricalDistribution([False, True] if p["kind"] == "bool" else p["choices"])


def remember(study, distributions, told):
    """Adds a trial of the tuner to Optuna's study. A server that crashes counts as worse than any other (PRUNED)."""
    if told["outcome"] == "unknown":  # the trial failed by no fault of its point
        return
    params = {name: value for name, value in told["point"].items() if name in distributions}
    known = {name: distributions[name] for name in params}
    state = TrialState.PRUNED if told["value"] is None else TrialState.COMPLETE
    try:
        study.add_trial(create_trial(state=state, value=told["value"], params=params, distributions=known))
    except ValueError:  # your current args may be out of range
        print(f"trial {told['number']} is left out: {told['point']}", file=sys.stderr)


def main():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    for line in sys.stdin:
        message = json.loads(line)
        if space := message.get("space"):
            space_seed = space["seed"]
            distributions = {p["name"]: distribution(p) for p in space["parameters"]}
            print(json.dumps({"ready": True}), flush=True)
        elif told := message.get("tell"):
            remember(study, distributions, told)
        elif ask := message.get("ask"):
            # The seed is a function of the study, the trial and the refused points, so a resumed study gets the same point.
            seed = zlib.crc32(f"{space_seed} {ask['number']} {ask['refused']}".encode())
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=6)
            trial = study.ask(distributions)
            study.tell(trial, state=TrialState.FAIL)  # the result comes with a later tell
            print(json.dumps({"point": trial.params}), flush=True)


main()
