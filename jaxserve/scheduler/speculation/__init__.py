"""Drafts of the tokens that come next: who guesses them, and when it pays to compute them."""
