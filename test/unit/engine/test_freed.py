"""What an unload gives back survives its way through a text field."""

from sglang_graft.engine.freed import Freed


def test_round_trip() -> None:
    freed = Freed(3, 4, 2**21)
    assert Freed.from_text(freed.to_text()) == freed
