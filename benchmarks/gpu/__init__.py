"""Benchmark of the engine on one GPU: `python -m benchmarks.gpu`."""
