"""Start-up: from flags to a ready server. Process settings, memory plan, programs, step times."""
