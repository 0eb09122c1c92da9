"""Replay: the tree and its policies against seeded workloads, with modelled times."""
