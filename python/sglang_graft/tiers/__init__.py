"""What moves between device and host. So far: adapters, whose images stay on the host for good."""

from sglang_graft.tiers.residency import KnownAdapter, Residency

__all__ = ["KnownAdapter", "Residency"]
