"""Builders of the children: pure functions from a resource to manifests for server-side apply.

A manifest holds exactly the fields that the operator owns, without empty ones, which the API server would drop.
"""
