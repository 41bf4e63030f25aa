"""How autoscaling policies compare, by discrete events over the engine's scheduler: `docs/benchmarks/autoscaling.md`.

`python -m benchmarks.autoscaling` runs the whole comparison and prints its table.
"""
