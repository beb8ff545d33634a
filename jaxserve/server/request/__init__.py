"""From a request body to checked fields, and from fields to engine requests."""
