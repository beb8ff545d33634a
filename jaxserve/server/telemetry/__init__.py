"""What is told of requests that have ended: log lines, spans."""
