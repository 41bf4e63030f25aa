"""Routings of requests to replicas, each in a module, and their comparison: `docs/benchmarks/routing.md`.

`python -m benchmarks.autoscaling.routing` runs the comparison and prints its tables.
"""
