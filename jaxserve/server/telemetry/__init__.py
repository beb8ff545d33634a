"""Log lines and spans of finished requests."""
