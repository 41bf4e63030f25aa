"""The rules of a decision, which `autoscale/decide.py` applies in order. Pure."""
