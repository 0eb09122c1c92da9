"""DoRA and lora_bias besides the format table: norms, missing base weights, identity."""

from pathlib import Path

import helpers_peft as hp
import pytest
import torch

from sglang_graft.adapters import AdapterError, Delta, NoBaseWeight, read_adapter, vectors
from sglang_graft.adapters.adapter import identity_of

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_norms_do_not_depend_on_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_BLOCK", block)
    weight = torch.randn(37, 24, dtype=torch.bfloat16)
    delta = Delta(torch.randn(3, 24).bfloat16(), torch.randn(37, 3).bfloat16(), 0.7, 3)
    whole = weight.double() + 0.7 * (delta.b.double() @ delta.a.double())
    found = vectors.row_norms(weight, delta)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), whole.norm(dim=1), rtol=1e-6, atol=0)


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_BLOCK", 64)
    seen = []
    norm = torch.linalg.vector_norm

    def counting(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(matrix.numel())
        return norm(matrix, dim=dim)

    monkeypatch.setattr(torch.linalg, "vector_norm", counting)
    vectors.row_norms(torch.ones(50, 16), Delta(torch.ones(1, 16), torch.ones(50, 1), 1.0, 1))
    assert max(seen) <= 64
    assert sum(seen) == 50 * 16


def test_dora_without_base_weights_is_checked_but_not_complete(tmp_path: Path) -> None:
    model = hp.save_adapter(tmp_path, use_dora=True)
    alone = read_adapter(tmp_path, hp.tiny_spec())
    assert not any(delta.is_complete for delta in alone.deltas.values())
    assert ["no weights of the base model" in warning for warning in alone.warnings] == [True]
    whole = read_adapter(tmp_path, hp.tiny_spec(), hp.base_weight(model))
    assert all(delta.is_complete for delta in whole.deltas.values())
    assert whole.warnings == ()
    assert whole.identity == alone.identity
    hp.edit_tensors(tmp_path, lambda t: t | {f"{Q0}.lora_magnitude_vector": torch.ones(7)})
    with pytest.raises(AdapterError, match=r"wanted shape \[64\] for this base model, got \[7\]"):
        read_adapter(tmp_path, hp.tiny_spec())


def test_plain_lora_and_biases_need_no_base_weights(tmp_path: Path) -> None:
    def never(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError(f"asked for layer {layer} {linear}")

    for number, flags in enumerate(({}, {"lora_bias": True})):
        hp.save_adapter(tmp_path / str(number), **flags)
        adapter = read_adapter(tmp_path / str(number), hp.tiny_spec(), never)
        assert all(delta.is_complete for delta in adapter.deltas.values())


def test_a_base_model_without_plain_weights_refuses_dora(tmp_path: Path) -> None:
    def quantized(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NoBaseWeight(f"{linear} is quantized")

    hp.save_adapter(tmp_path, use_dora=True)
    with pytest.raises(AdapterError) as caught:
        read_adapter(tmp_path, hp.tiny_spec(), quantized)
    assert caught.value.item == f"{Q0}.lora_magnitude_vector"
    assert caught.value.reason == "needs plain base weights: q_proj is quantized"


@pytest.mark.parametrize("flag", ["use_dora", "lora_bias"])
def test_every_number_of_a_vector_counts_for_the_identity(flag: str, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, attention_bias=True, **{flag: True})
    part = "lora_magnitude_vector" if flag == "use_dora" else "lora_B.bias"
    seen = {read_adapter(tmp_path, hp.tiny_spec()).identity}
    for place in (0, 63):

        def nudge(tensors: hp.Tensors, place: int = place) -> None:
            tensors[f"{Q0}.{part}"][place] += 1

        hp.edit_tensors(tmp_path, nudge)
        seen.add(read_adapter(tmp_path, hp.tiny_spec()).identity)
    assert len(seen) == 3


def test_a_vector_of_another_kind_is_another_identity() -> None:
    a, b, values = torch.ones(1, 4), torch.ones(6, 1), torch.ones(6)
    plain = Delta(a, b, 1.0, 1)
    kinds = [plain, Delta(a, b, 1.0, 1, magnitude=values), Delta(a, b, 1.0, 1, bias=values)]
    assert len({identity_of({(0, "q_proj"): delta}) for delta in kinds}) == 3
