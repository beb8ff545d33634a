"""Runs grammars in separate processes, so that a client's grammar can break only its own process.

`python -m jaxserve.grammar_server` reads the tokenizer once and forks a process per grammar. That
process compiles the grammar and then computes the masks of the sequences that follow it. The HTTP
server's process does not import llguidance.
"""
