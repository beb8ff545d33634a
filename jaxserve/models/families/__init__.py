"""One module per family: how its config.json becomes a ModelSpec, its tensor names, and what it
does not support. Only `jaxserve.models.registry` imports these modules."""
