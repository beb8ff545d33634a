"""Which model the flags mean, where its weights come from, and what becomes of them."""
