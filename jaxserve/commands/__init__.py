"""The commands of `python -m jaxserve`, except `bench`, which is a separate package."""
