#!/usr/bin/env python3
"""Reads an exported study as an Optuna user would, prints what Optuna sees as one JSON object, and continues the study.

usage: optuna_client.py FILE

Continuing adds a trial to FILE. The object shows the study before that.
"""

import json
import sys

import optuna
from optuna.distributions import distribution_to_json


def seen(study):
    trials = [
        {
            "number": t.number,
            "state": t.state.name,
            "value": t.value,
            "params": t.params,
            "distributions": {name: json.loads(distribution_to_json(d)) for name, d in t.distributions.items()},
            "intermediate": t.intermediate_values,
            "user": t.user_attrs,
            "timed": t.datetime_start is not None and (t.datetime_complete is not None) == t.state.is_finished(),
        }
        for t in study.trials
    ]
    return {"name": study.study_name, "direction": study.direction.name, "best": study.best_trial.number, "user": study.user_attrs, "trials": trials}


def go_on(study):
    """Lets TPE choose a point, without its random start, and reports a value for the point."""
    known = max((t.distributions for t in study.trials if t.value is not None), key=len)
    trial = study.ask(known)
    for name, distribution in known.items():
        if not distribution._contains(distribution.to_internal_repr(trial.params[name])):
            sys.exit(f"optuna_client.py: TPE asks for {name}={trial.params[name]}, which is not in {distribution}")
    study.tell(trial, 1.5)
    if study.trials[-1].value != 1.5:
        sys.exit("optuna_client.py: the study lacks the reported value")
    return trial.params


def main():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=1)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{sys.argv[1]}", sampler=sampler)
    answer = seen(study)
    frame = study.trials_dataframe()
    answer["columns"], answer["rows"] = list(frame.columns), len(frame)
    answer["asked"] = go_on(study)
    json.dump(answer, sys.stdout)


main()
