"""Fetching a model's files, from a hub or an object store, into a folder that is whole or not served.

Nothing here knows of torch or of Kubernetes: `fastgen fetch` is the program, whoever starts it again after it failed
finds what was fetched so far.
"""
