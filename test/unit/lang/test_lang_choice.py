"""Choices of adapters: where they hold, and that they do not leak. Without a server."""

import asyncio
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn about their own code
    import sglang as sgl
    from sglang.lang.backend.base_backend import BaseBackend
    from sglang.lang.choices import ChoicesDecision

    from sglang_graft import lang
    from sglang_graft.engine.hooks import problem
    from sglang_graft.lang.choice import ATTRIBUTE


class Recorder(lang.Endpoint):
    """An endpoint that keeps what it would send, and answers with the adapter's name."""

    def __init__(self) -> None:
        BaseBackend.__init__(self)
        self.adapter = None
        self.support_concate_and_append = False
        self.sent: list[dict[str, Any]] = []

    def _sent(self, s: Any) -> str:
        data: dict[str, Any] = {"text": s.text_}
        self._add_images(s, data)
        self.sent.append(data)
        return f"[{data.get('lora_path', 'base')}]"

    def generate(self, s: Any, sampling_params: Any) -> Any:
        return self._sent(s), {}

    def generate_stream(self, s: Any, sampling_params: Any) -> Any:
        yield self._sent(s), {}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        self._sent(s)
        return ChoicesDecision(choices[0], {})

    def commit_lazy_operations(self, s: Any) -> None:
        self._sent(s)


@pytest.fixture
def backend() -> Recorder:
    return Recorder()


@sgl.function
def one(s: Any, start: str = "") -> None:
    s += start + sgl.gen("x")


def test_every_hook_is_live() -> None:
    assert [problem(hook) for hook in lang.HOOKS] == [None] * len(lang.HOOKS)


def test_nothing_chosen_asks_for_nothing(backend: Recorder) -> None:
    assert one.run("a", backend=backend)["x"] == "[base]"
    assert backend.sent == [{"text": "a"}]
    assert lang.current() is None


@pytest.mark.parametrize("use_thread", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_the_innermost_choice_wins(backend: Recorder, stream: bool, use_thread: bool) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("own")
        with lang.adapter("a"):
            s += sgl.gen("block")
            s += lang.adapter("b")(sgl.gen("one")) + sgl.gen("rest")
            with lang.adapter(None):
                s += sgl.user(sgl.gen("none"))
            s += sgl.gen("after")
        s += "text" + lang.adapter("c")(sgl.select("pick", choices=["p", "q"]))
        s += sgl.gen("end")

    with lang.adapter("outer"):
        s = program.run(adapter="own", backend=backend, stream=stream, use_thread=use_thread)
    s.sync()
    names = ("own", "block", "one", "rest", "none", "after", "end")
    wanted = ("own", "a", "b", "a", "base", "a", "own")
    assert [s[name] for name in names] == [f"[{name}]" for name in wanted]
    assert s["pick"] == "p"
    assert [d["lora_path"] for d in backend.sent if d.get("lora_path") == "c"] == ["c"]


def test_a_block_holds_for_every_state_that_is_written_in_it(backend: Recorder) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "start "
        s.sync()  # SGLang computes the prefix of a fork only if its text is there by then
        with lang.adapter("a"):
            forks = s.fork(2)
            forks[0] += sgl.gen("x")
        forks[1] += sgl.gen("x")
        with lang.adapter("b"):
            for fork in forks:
                fork += sgl.gen("y")
        forks.join()

    s = program.run(adapter="own", backend=backend)
    assert (s["x"], s["y"]) == (["[a]", "[own]"], ["[b]", "[b]"])
    assert backend.sent[0] == {"text": "start ", "lora_path": "a"}, "the prefix of the fork"


def test_an_error_in_a_block_ends_the_choice(backend: Recorder) -> None:
    with pytest.raises(RuntimeError), lang.adapter("a"):
        raise RuntimeError
    assert lang.current() is None
    block = lang.adapter("a")
    with block, lang.adapter("b"), block:
        assert lang.current() == "a"
    assert lang.current() is None


def test_threads_and_tasks_have_choices_of_their_own(backend: Recorder) -> None:
    barrier = threading.Barrier(4)

    def thread(name: str) -> str:
        with lang.adapter(name):
            barrier.wait(10)
            return str(one.run(backend=backend)["x"])

    async def task(name: str) -> str:
        with lang.adapter(name):
            await asyncio.sleep(0)
            return str(one.run(backend=backend)["x"])

    async def tasks() -> list[str]:
        return await asyncio.gather(*map(task, "abcd"))

    wanted = [f"[{name}]" for name in "abcd"]
    with lang.adapter("outer"), ThreadPoolExecutor(4) as threads:
        assert list(threads.map(thread, "abcd")) == wanted
        assert asyncio.run(tasks()) == wanted
        assert lang.current() == "outer"


@pytest.mark.parametrize("generator", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch(backend: Recorder, threads: int, generator: bool) -> None:
    more = {"num_threads": threads, "generator_style": generator, "backend": backend}
    with lang.adapter("a"):
        taken = one.run_batch([{"start": "s"}] * 3, **more)
    with lang.adapter("b"):
        given = one.run_batch([{"start": "s"}] * 3, adapter="c", **more)
        assert [s["x"] for s in taken] == ["[a]"] * 3
        assert [s["x"] for s in given] == ["[c]"] * 3


def test_a_parameter_named_adapter_is_the_programs_own(backend: Recorder) -> None:
    @sgl.function
    def program(s: Any, adapter: str) -> None:
        s += adapter + sgl.gen("x")

    s = program.run(adapter="value", backend=backend)
    assert (s.text(), s["x"]) == ("value[base]", "[base]")


def test_an_expression_is_copied_not_changed() -> None:
    expression = sgl.gen("x")
    assert getattr(lang.adapter("a")(expression), ATTRIBUTE) == "a"
    assert not hasattr(expression, ATTRIBUTE)


@pytest.mark.parametrize("name", ["", 3, ["a"], b"a"])
def test_what_is_no_name_is_refused(backend: Recorder, name: Any) -> None:
    for wrong in (
        lambda: lang.adapter(name),
        lambda: one.run(adapter=name, backend=backend),
        lambda: backend.using(name),
    ):
        with pytest.raises(ValueError, match="adapter: wanted a name, or None"):
            wrong()
    with pytest.raises(ValueError, match="wanted an expression such as gen"):
        lang.adapter("a")("text")


def test_a_backend_that_asks_for_no_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adapter 'a': wanted sglang_graft\.lang\.Endpoint"):
        one.run(adapter="a", backend=BaseBackend())
    with lang.adapter("a"), pytest.raises(ValueError, match="got BaseBackend"):
        one.run_batch([{"start": "s"}], backend=BaseBackend())


def test_using_leaves_the_endpoint_as_it_is(backend: Recorder) -> None:
    other = backend.using("a")
    assert (other.adapter, backend.adapter) == ("a", None)
    assert one.run(backend=other)["x"] == "[a]"
    with lang.adapter(None):
        assert one.run(backend=other)["x"] == "[base]"
