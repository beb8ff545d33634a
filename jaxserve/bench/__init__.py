"""A load generator for any OpenAI-compatible server. Latencies count from the intended send time.

It runs in its own process, uses only HTTP, and does not depend on the engine.
"""
