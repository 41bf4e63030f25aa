"""The status of a FastGenDeployment: conditions, autoscaling, capacity, Events. Pure."""
