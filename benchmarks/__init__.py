"""Benchmarks. Each is a program that runs with one command."""
