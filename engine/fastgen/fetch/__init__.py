"""Download a model's files into a folder, which gets a marker when all of them are complete.

Independent of torch and Kubernetes. A restarted `fastgen fetch` reuses everything that was downloaded before.
"""
