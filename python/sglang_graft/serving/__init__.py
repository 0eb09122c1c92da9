"""HTTP: Graft's routes, and adapter names in requests."""
