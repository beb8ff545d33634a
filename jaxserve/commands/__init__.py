"""What `python -m jaxserve` does: serve, precompile, convert. (`bench` is a package of its own.)"""
