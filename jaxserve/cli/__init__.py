"""The command line: flags, their values, and the Options that they come to."""
