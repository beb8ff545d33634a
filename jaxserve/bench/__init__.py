"""Load on any OpenAI-compatible server, measured from the time each request was meant to be sent.

Runs in a process of its own and knows nothing of the engine: it sees HTTP.
"""
