"""What the endpoints share: admission, request handling, lifecycle, metrics."""
