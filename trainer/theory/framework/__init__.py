"""Run an experiment, judge its claims, draw its figures."""
