"""What the picker reads from the API server: FastGenDeployments and the EndpointSlices of their Services."""
