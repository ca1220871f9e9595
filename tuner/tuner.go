// Package tuner is the study loop: ask, begin, run, finish.
package tuner
