"""The flags of the tiers reach them."""

from types import SimpleNamespace

import pytest
from helpers_residency import make, unreadable

from sglang_graft import config
from sglang_graft.engine import tiers
from sglang_graft.tiers import TierOptions


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, TierOptions(host_kv=True, prefetch=True, idle_promotion=False)),
        ({"no_host_kv": True}, TierOptions(host_kv=False)),
        ({"no_prefetch": True}, TierOptions(prefetch=False)),
        ({"idle_promotion": True}, TierOptions(idle_promotion=True)),
    ],
)
def test_each_flag_is_its_option(
    flags: dict[str, bool], wanted: TierOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[TierOptions] = []

    def build(*parts: object, options: TierOptions, **rest: object) -> None:
        given.append(options)

    monkeypatch.setattr(tiers, "build_tiers", build)
    monkeypatch.setattr(tiers, "CpuCopier", lambda *parts: None)
    monkeypatch.setattr(config, "published", lambda: config.GraftConfig(**flags))
    residency = make()
    pool = SimpleNamespace(arena=residency.arena, host=None, prices=None)
    tiers.make_tiers(pool, residency, unreadable)  # type: ignore[arg-type]
    assert given == [wanted]
