"""Products of many tokens in e4m3, for which tensor cores are twice as fast as for bfloat16."""
