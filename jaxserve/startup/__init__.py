"""From flags to a server that is ready: the process, memory, programs, measured times."""
