"""The device side of a step: its arrays, its programs, launch and collect."""
