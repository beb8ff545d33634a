"""Grammars in processes of their own: what clients write may cost one of these, never the server.

`python -m jaxserve.grammar_server` reads the tokenizer once and forks a process per grammar, which
compiles it and then computes the masks of the sequences that follow it. The server itself does not
import llguidance.
"""
