"""Download a model's files into a folder that is complete or not served.

Independent of torch and Kubernetes. A restarted `fastgen fetch` reuses everything that was downloaded before.
"""
