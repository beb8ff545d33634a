"""The command line: flags, the parsers of their values, and the resulting Options."""
