"""The gateway's picker: decides which replica answers a request; Envoy carries the bytes."""
