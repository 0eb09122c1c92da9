"""Token ids out of the vocabulary and adapter lists of another length go no further."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_graft.serving.request_checks import check_adapter_list, check_one

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=512), is_generation=True)


@pytest.mark.parametrize("bad", [-1, 512, 10**9])
def test_an_id_out_of_range_is_named(bad: int) -> None:
    ids = [0, 511, bad, 3]
    with pytest.raises(ValueError, match=f"from 0 to 511, got {bad}"):
        check_one(MANAGER, SimpleNamespace(input_ids=ids), ids)


@pytest.mark.parametrize("ids", [[0, 511], [], None])
def test_ids_of_the_vocabulary_pass(ids: list[int] | None) -> None:
    check_one(MANAGER, SimpleNamespace(input_ids=ids), ids)
    check_one(MANAGER, SimpleNamespace(input_ids=None), [10**9])


def test_a_server_for_embeddings_generates_nothing() -> None:
    embeds = SimpleNamespace(model_config=MANAGER.model_config, is_generation=False)
    with pytest.raises(ValueError, match="started with --is-embedding"):
        check_one(embeds, GenerateReqInput(input_ids=[1]), [1])
    check_one(embeds, EmbeddingReqInput(input_ids=[1]), [1])
    check_one(MANAGER, GenerateReqInput(input_ids=[1]), [1])


@pytest.mark.parametrize(("names", "batch", "n"), [(["a"], 2, 1), (["a", None, "a"], 2, 1)])
def test_c67_a_list_of_another_length_is_refused(names: list[str], batch: int, n: int) -> None:
    request = SimpleNamespace(lora_path=names, batch_size=batch, parallel_sample_num=n)
    with pytest.raises(ValueError, match=f"each of {batch * n} samples, got {len(names)}"):
        check_adapter_list(MANAGER, request)


@pytest.mark.parametrize(
    ("names", "n"), [(["a", None], 1), (["a", None] * 3, 3), ("a", 1), (None, 1)]
)
def test_lists_of_the_right_length_and_single_names_pass(names: object, n: int) -> None:
    check_adapter_list(
        MANAGER, SimpleNamespace(lora_path=names, batch_size=2, parallel_sample_num=n)
    )
    check_adapter_list(MANAGER, SimpleNamespace(batch_size=1))
