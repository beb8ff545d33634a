"""Prometheus metrics of the server and the engine."""
