"""Finds the model that the flags name, and loads, quantises and converts its weights."""
