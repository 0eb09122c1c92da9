"""Ids outside of the vocabulary are refused before they reach the model."""

from types import SimpleNamespace

import pytest

from sglang_graft.serving.token_ids import check_token_ids

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=512))


@pytest.mark.parametrize("bad", [-1, 512, 10**9])
def test_an_id_out_of_range_is_named(bad: int) -> None:
    ids = [0, 511, bad, 3]
    with pytest.raises(ValueError, match=f"from 0 to 511, got {bad}"):
        check_token_ids(MANAGER, SimpleNamespace(input_ids=ids), ids)


@pytest.mark.parametrize("ids", [[0, 511], [], None])
def test_ids_of_the_vocabulary_pass(ids: list[int] | None) -> None:
    check_token_ids(MANAGER, SimpleNamespace(input_ids=ids), ids)
    check_token_ids(MANAGER, SimpleNamespace(input_ids=None), [10**9])
