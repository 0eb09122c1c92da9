"""A campaign: many runs in one file, in lots whose servers start together.

A start costs more than a short unit, so servers of different workloads and budgets share one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.run import Plan
from sglang_graft.bench.units import Load
from sglang_graft.sim.workloads import GENERATORS


class CampaignError(ValueError):
    """The file cannot be used; the message names it and the field."""


class Run(BaseModel):
    """What one `graft bench run` measures; fields are named as its options are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workload: str
    budget_gb: list[float] = Field(min_length=1)
    rates: list[float] = Field(min_length=1)
    seconds: float = Field(gt=0)
    peers: list[str] = Field(min_length=1)
    drain_s: float = Field(60.0, ge=0)
    seeds: list[int] = Field([0], min_length=1)
    adapters: int | None = Field(None, ge=2)

    def plan(self, distinct: int | None) -> Plan:
        """Raises ValueError when workload or peers are not known."""
        if self.workload not in GENERATORS:
            known = ", ".join(GENERATORS)
            raise ValueError(f"workload: wanted one of {known}; got {self.workload!r}")
        if not all(number > 0 for number in (*self.rates, *self.budget_gb)):
            raise ValueError(
                f"rates, budget_gb: wanted numbers above 0, got {self.rates} and {self.budget_gb}"
            )
        loads = [
            Load(
                name=self.workload,
                rate=rate,
                seconds=self.seconds,
                adapters=self.adapters,
                seed=seed,
            )
            for seed in self.seeds
            for rate in self.rates
        ]
        return Plan(
            peers=parse_peers(self.peers),
            loads=loads,
            budgets_gb=self.budget_gb,
            drain_s=self.drain_s,
            distinct=distinct,
        )


class Lot(BaseModel):
    """Runs whose servers start together: all of them must fit beside each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: list[Run] = Field(min_length=1)


class Campaign(BaseModel):
    """The whole file. Flags of servers are written as on a command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    distinct_weights: int | None = Field(None, ge=1)
    server_args: str = ""
    stock_args: str = ""
    base_args: str = ""
    graft_args: str = ""
    lots: list[Lot] = Field(min_length=1)

    def plans(self) -> list[Sequence[Plan]]:
        """Of each lot, in the order of the file. Raises ValueError as `Run.plan` does."""
        found: list[Sequence[Plan]] = []
        for number, lot in enumerate(self.lots):
            plans = []
            for place, run in enumerate(lot.runs):
                try:
                    plans.append(run.plan(self.distinct_weights))
                except ValueError as error:
                    raise ValueError(f"lots.{number}.runs.{place}: {error}") from None
            found.append(plans)
        return found


def read_campaign(file: Path) -> tuple[Campaign, list[Sequence[Plan]]]:
    """The file and its plans, lot by lot. Raises CampaignError."""
    try:
        campaign = Campaign.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        return campaign, campaign.plans()
    except ValidationError as error:
        told = (
            f"{file}: {'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}"
            for one in error.errors()
        )
        raise CampaignError("\n".join(told)) from None
    except (OSError, ValueError) as error:  # the latter: not TOML, not UTF-8, or a wrong value
        raise CampaignError(f"{file}: {error}") from None
