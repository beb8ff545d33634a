"""Compiled programs: loaded from files, or compiled and stored."""
