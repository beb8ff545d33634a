"""One thread that owns the device, and the streams that it feeds."""
