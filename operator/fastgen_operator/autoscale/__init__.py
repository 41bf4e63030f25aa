"""Autoscaling on tokens: engine metrics, demand, capacity, needs, decision.

Pure, except `scrape` and `loop`.
"""
