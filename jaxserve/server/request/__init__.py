"""A body to checked fields, and fields to what the engine takes."""
