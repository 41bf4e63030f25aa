"""Discrete-event simulator that compares autoscaling policies: `docs/benchmarks/autoscaling.md`.

`python -m benchmarks.autoscaling` runs the whole comparison and prints its tables.
"""
