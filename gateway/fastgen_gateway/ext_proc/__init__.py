"""Envoy's external processing protocol: messages, and the server that answers them."""
