"""Products of many tokens in e4m3: the tensor cores compute twice as many as in bfloat16."""
