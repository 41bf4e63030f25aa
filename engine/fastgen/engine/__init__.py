"""The engine and its process: step loop, messages, calibration, and the server's client."""
