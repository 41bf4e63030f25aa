"""Autoscale on tokens: scrape engines, measure demand and capacity, decide on replicas.

`loop` runs it: `scrape` → `sample` → `measure` → `rules`, which `decide` applies → `decision`. Everything except
`scrape`, `loop` and `watchlist` is pure.
"""
