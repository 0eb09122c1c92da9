"""The check without weights says what reading says, for every row of the format table."""

from pathlib import Path

import helpers_peft as hp
import pytest
from format_case import FormatCase
from format_table import CASES

from sglang_graft.adapters import AdapterError, TileMap, pack, read_adapter
from sglang_graft.adapters.headers import Limits, check_headers

LIMITS = Limits(rank=64, nbytes=2**30)
BEHIND_HEADERS = ("NaN or infinite", "too large", "base model", "base weights", "that is zero")


def refusal(read: object, *arguments: object) -> str | None:
    try:
        read(*arguments)  # type: ignore[operator]
    except AdapterError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.test_id) for case in CASES])
def test_C137_headers_tell_what_reading_would(case: FormatCase, tmp_path: Path) -> None:
    model = case.make(tmp_path)
    base = None if model is None else hp.base_weight(model)

    def read() -> None:
        adapter = read_adapter(tmp_path, case.spec(), base)
        pack(adapter, TileMap(case.spec(), 8192, max_rank=LIMITS.rank))

    from_headers = refusal(check_headers, tmp_path, case.spec(), LIMITS)
    from_reading = refusal(read)
    if from_headers is None and from_reading is not None:
        # Then nothing but numbers can still be wrong, or what takes the base model to tell.
        assert any(part in from_reading for part in BEHIND_HEADERS)
    if case.refused is None:
        assert from_headers is None
    elif from_headers is not None and "rank of at most" not in from_headers:
        assert from_headers == from_reading


def test_the_pool_bounds_what_is_usable(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == "plain")
    case.make(tmp_path)
    check_headers(tmp_path, case.spec(), LIMITS)
    with pytest.raises(AdapterError, match=r"take \d+ bytes, the whole pool has 10"):
        check_headers(tmp_path, case.spec(), Limits(rank=64, nbytes=10))
    with pytest.raises(AdapterError, match=r"rank of at most 1.*--max-lora-rank"):
        check_headers(tmp_path, case.spec(), Limits(rank=1, nbytes=2**30))


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a folder"):
        check_headers(tmp_path / "nobody", CASES[0].spec(), LIMITS)
