"""KV cache events: tell routers which pages are cached, in vLLM's format over ZMQ."""
