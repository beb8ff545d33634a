"""One module per family: how its config.json becomes a ModelSpec, which tensors it has, what it
refuses. Only `jaxserve.models.registry` imports them."""
