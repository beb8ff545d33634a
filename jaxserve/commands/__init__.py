"""The commands of `python -m jaxserve`, except `bench`, which is a package of its own."""
