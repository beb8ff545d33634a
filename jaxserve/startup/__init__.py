"""Start-up, from flags to a ready server: process settings, memory plan, programs, step times."""
