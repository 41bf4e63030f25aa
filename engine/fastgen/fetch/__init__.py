"""Download a model's files into a folder that is complete or not served.

Nothing here knows of torch or of Kubernetes: `fastgen fetch` is the program, whoever starts it again after it failed
finds what was fetched so far.
"""
