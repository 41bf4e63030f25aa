"""One reconcile of one resource: observe, plan, apply, status."""
