"""The engine thread, which owns the device, and the event loop's side of its streams."""
