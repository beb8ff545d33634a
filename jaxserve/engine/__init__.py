"""The engine: a thread that owns the device, and streams that the event loop reads."""
