"""Identities by registration, for the HTTP process."""

from types import SimpleNamespace

from sglang_graft.engine import control, identities


def known(adapter_id: str, identity: str) -> SimpleNamespace:
    return SimpleNamespace(adapter_id=adapter_id, node=SimpleNamespace(identity=identity))


def test_adapters_with_a_name_and_those_that_wait_for_their_requests() -> None:
    residency = SimpleNamespace(
        known=lambda: [known("1", "a"), known("2", "a")], retired=lambda: [known("0", "old")]
    )
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(residency=residency))
    assert identities.identities(scheduler, {}) == {"1": "a", "2": "a", "0": "old"}
    assert control.OPERATIONS["identities"] is identities.identities
