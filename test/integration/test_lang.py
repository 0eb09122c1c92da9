"""Programs of SGLang's frontend language choose adapters; answers are those of /generate."""

import asyncio
import random
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from harness import STRICT, Server, serve, wait_until
from prometheus_client.parser import text_string_to_metric_families

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn about their own code
    import sglang as sgl
    from sglang.global_config import global_config

    from sglang_graft import lang

pytestmark = [
    pytest.mark.server,
    # The server closes idle connections; sockets of `requests` are closed by the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LEGAL, SALES = "legal", "sales"
FLAGS = ("--page-size", "16", "--max-total-tokens", "16384")
NAMES = (None, LEGAL, SALES)
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def text(length: int, seed: int) -> str:
    """Words that no other test uses; with a space at the end, as the tokenizer wants words."""
    source = random.Random(seed)
    return "".join(f"{tiny_model.word(source.randrange(1, 512))} " for _ in range(length))


@pytest.fixture(scope="module")
def server(
    base_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lang")
    two = {LEGAL: adapters["all-r16"], SALES: adapters["all-r64"]}
    with serve(base_model, folder, *FLAGS, adapters=two, env=STRICT) as started:
        yield started


@pytest.fixture(scope="module")
def endpoint(server: Server) -> lang.Endpoint:
    return lang.Endpoint(server.url)


@pytest.fixture(autouse=True)
def default_backend(endpoint: lang.Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_config, "default_backend", endpoint)


def plain(server: Server, name: str | None, prompt: str, **sampling: Any) -> str:
    """The text of POST /generate."""
    body = {"text": prompt, "lora_path": name, "sampling_params": GREEDY | sampling}
    return str(server.generate(body)["text"])


@sgl.function
def answer(s: Any, prompt: str) -> None:
    s += prompt
    s += sgl.gen("answer")


def test_each_way_to_choose_gives_the_adapters_answer(server: Server) -> None:
    prompt = text(20, 1)
    wanted = {name: plain(server, name, prompt) for name in NAMES}
    assert len(set(wanted.values())) == 3, "the adapters must differ for this to say anything"
    for name in NAMES:
        assert answer.run(prompt, adapter=name, **GREEDY)["answer"] == wanted[name]
        with lang.adapter(name):
            assert answer.run(prompt, **GREEDY)["answer"] == wanted[name]
            assert answer(prompt, **GREEDY)["answer"] == wanted[name]
        using = lang.Endpoint(server.url, adapter=name)
        assert answer.run(prompt, backend=using, **GREEDY)["answer"] == wanted[name]
    assert answer.run(prompt, **GREEDY)["answer"] == wanted[None]


def test_blocks_and_single_expressions_inside_a_program(server: Server) -> None:
    @sgl.function
    def mixed(s: Any, prompt: str) -> None:
        s += prompt
        with lang.adapter(LEGAL):
            s += sgl.gen("legal")
            with lang.adapter(None):
                s += " " + sgl.gen("base") + " " + lang.adapter(SALES)(sgl.gen("sales"))
            s += " " + sgl.gen("again")
        s += " " + sgl.gen("own")

    for own in NAMES:
        s = mixed.run(text(20, 2), adapter=own, **GREEDY)
        assert s.error() is None
        so_far = text(20, 2)
        for variable, name in (
            *(("legal", LEGAL), ("base", None), ("sales", SALES), ("again", LEGAL)),
            ("own", own),
        ):
            assert s[variable] == plain(server, name, so_far), (own, variable)
            so_far += s[variable] + " "
        assert s.text() + " " == so_far


def test_forks_share_the_prefix_of_the_adapter(server: Server) -> None:
    @sgl.function
    def branches(s: Any, prompt: str, name: str) -> list[int]:
        s += prompt
        s.sync()  # SGLang computes the prefix of a fork only if its text is there by then
        with lang.adapter(name):
            forks = s.fork(3)
            for i, fork in enumerate(forks):
                fork += text(2, 50 + i) + sgl.gen("branch")
        forks.join()
        s += text(1, 60) + sgl.gen("end")
        return [fork.get_meta_info("branch")["cached_tokens"] for fork in forks]

    server.flush()
    for seed, name in ((3, LEGAL), (4, SALES)):
        prompt = text(64, seed)
        s = branches.run(prompt, name, **GREEDY)
        assert s.ret_value == [64] * 3, "computed once, for this adapter"
        wanted = [plain(server, name, prompt + text(2, 50 + i)) for i in range(3)]
        assert s["branch"] == wanted
        assert s["end"] == plain(server, None, prompt + text(1, 60))


def test_join_appends_the_texts_of_the_branches(server: Server) -> None:
    @sgl.function
    def joined(s: Any, prompt: str) -> None:
        s += prompt
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += text(2, 80 + i) + sgl.gen("part") + " "
        forks.join("concate_and_append")
        s += sgl.gen("end")

    prompt = text(20, 6)
    s = joined.run(prompt, adapter=SALES, **GREEDY)
    assert s.error() is None
    parts = [text(2, 80 + i) for i in range(2)]
    so_far = prompt + "".join(f"{part}{plain(server, SALES, prompt + part)} " for part in parts)
    assert s["end"] == plain(server, SALES, so_far)


def test_turns_share_the_prefix_of_the_adapter(server: Server) -> None:
    @sgl.function
    def talk(s: Any, question: str) -> None:
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("first"))
        s += sgl.user(text(3, 90))
        s += sgl.assistant(sgl.gen("second"))

    s = talk.run(text(60, 7), adapter=LEGAL, **GREEDY)
    assert s.error() is None
    first, second = s.get_meta_info("first"), s.get_meta_info("second")
    assert second["cached_tokens"] >= (first["prompt_tokens"] // 16) * 16 > 0
    other = talk.run(text(60, 7), adapter=SALES, **GREEDY)
    assert other.get_meta_info("first")["cached_tokens"] == 0, "KV of one adapter is not another's"


def test_select_is_the_adapters_choice(server: Server) -> None:
    choices = [text(2, 100 + i).strip() for i in range(6)]

    @sgl.function
    def choose(s: Any, prompt: str) -> None:
        s += prompt
        s += sgl.select("choice", choices=choices)

    differ = 0
    for seed in range(6):
        prompt = text(12, 200 + seed)
        picked = [choose.run(prompt, adapter=name) for name in NAMES]
        for name, s in zip(NAMES, picked, strict=True):
            assert s["choice"] == best(server, name, prompt, choices)
        differ += len({s["choice"] for s in picked}) > 1
    assert differ, "the adapters must differ for this to say anything"


def best(server: Server, name: str | None, prompt: str, choices: list[str]) -> str:
    """The choice with the highest mean log-probability of its tokens."""
    start = len(prompt.split())
    body = {
        "text": [prompt + choice for choice in choices],
        "lora_path": [name] * len(choices),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    rows = [row["meta_info"]["input_token_logprobs"] for row in server.generate(body)]
    means = [
        sum(value for value, *_ in row if value) / sum(bool(v) for v, *_ in row) for row in rows
    ]
    return choices[means.index(max(means))]


def test_a_regular_expression_bounds_the_adapters_answer(server: Server) -> None:
    # No token is the beginning of what it allows, so each answer is whole.
    pattern = "w[2-9]"

    @sgl.function
    def digit(s: Any, prompt: str) -> None:
        s += prompt
        s += sgl.gen("digit", regex=pattern, max_tokens=1)

    found = set()
    for seed in range(4):
        for name in NAMES:
            s = digit.run(text(20, 600 + seed), adapter=name, temperature=0)
            sampling = {"regex": pattern, "max_new_tokens": 1, "ignore_eos": False}
            assert s["digit"] == plain(server, name, text(20, 600 + seed), **sampling)
            assert re.fullmatch(pattern, s["digit"].strip())
            found.add((seed, s["digit"]))
    assert len(found) > 4, "the adapters must differ for this to say anything"


def test_streams_keep_their_adapter_in_threads_and_tasks(server: Server) -> None:
    prompts = [text(20, 300 + i) for i in range(6)]
    names = [NAMES[i % 3] for i in range(6)]
    wanted = [plain(server, n, p) for n, p in zip(names, prompts, strict=True)]

    def stream(name: str | None, prompt: str) -> str:
        with lang.adapter(name):
            s = answer.run(prompt, stream=True, **GREEDY)
        return "".join(s.text_iter("answer"))

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(stream, names, prompts)) == wanted

    async def task(name: str | None, prompt: str) -> str:
        with lang.adapter(name):
            await asyncio.sleep(0.01)  # the others make their choices meanwhile
            s = answer.run(prompt, stream=True, **GREEDY)
        return "".join([part async for part in s.text_async_iter("answer")])

    async def all_tasks() -> list[str]:
        return await asyncio.gather(*map(task, names, prompts))

    assert asyncio.run(all_tasks()) == wanted


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_batch_keeps_its_adapter_whatever_surrounds_it(
    server: Server, threads: int, generator: bool
) -> None:
    prompts = [text(20, 400 + i) for i in range(5)]
    batch = [{"prompt": prompt} for prompt in prompts]
    more: dict[str, Any] = {"num_threads": threads, "generator_style": generator, **GREEDY}
    with lang.adapter(SALES):
        sales = answer.run_batch(batch, **more)
    with lang.adapter(SALES):  # also while a lazy one is consumed
        legal = list(answer.run_batch(batch, adapter=LEGAL, **more))
    with lang.adapter(LEGAL):
        sales = list(sales)
    for name, states in ((SALES, sales), (LEGAL, legal)):
        assert [s["answer"] for s in states] == [plain(server, name, p) for p in prompts]
    assert lang.current() is None


def test_a_program_that_another_one_starts_begins_with_its_adapter(server: Server) -> None:
    @sgl.function
    def outer(s: Any, prompt: str, name: str | None) -> None:
        inner = answer.run(prompt, **GREEDY)
        other = answer.run(prompt, adapter=name, **GREEDY)
        s += prompt + inner["answer"] + " " + other["answer"]

    prompt = text(20, 9)
    wanted = {name: plain(server, name, prompt) for name in NAMES}
    for stream in (False, True):
        s = outer.run(prompt, SALES, adapter=LEGAL, stream=stream, **GREEDY)
        s.sync()
        if stream:
            "".join(s.text_iter())
        assert s.text() == f"{prompt}{wanted[LEGAL]} {wanted[SALES]}"


def test_the_common_prefix_of_a_batch_is_cached_for_the_adapter(server: Server) -> None:
    server.flush()
    start = text(70, 10)

    @sgl.function
    def long(s: Any, end: str) -> None:
        s += start
        s += end
        s += sgl.gen("answer")

    states = long.run_batch([{"end": text(2, 500 + i)} for i in range(3)], adapter=LEGAL, **GREEDY)
    assert all(s.get_meta_info("answer")["cached_tokens"] >= 64 for s in states)
    assert server.pool()["base"]["kv_pages"] == 0


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_adapter_is_an_error_with_the_list(server: Server, stream: bool) -> None:
    s = answer.run(text(4, 11), adapter="nobody", stream=stream, **GREEDY)
    if stream:
        "".join(s.text_iter())
    assert "nobody" in str(s.error())
    assert "Loaded adapters: legal, sales" in str(s.error())
    assert answer.run(text(4, 11), adapter=LEGAL, **GREEDY).error() is None


def test_a_backend_that_asks_for_no_adapter_is_refused(server: Server) -> None:
    stock = sgl.RuntimeEndpoint(server.url)
    with pytest.raises(ValueError, match=r"wanted sglang_graft\.lang\.Endpoint"):
        answer.run(text(4, 12), adapter=LEGAL, backend=stock)

    @sgl.function
    def inside(s: Any) -> None:
        with lang.adapter(LEGAL):
            s += text(4, 12)

    with pytest.raises(ValueError, match=r"wanted sglang_graft\.lang\.Endpoint"):
        inside.run(backend=stock)
    assert answer.run(text(4, 12), backend=stock, **GREEDY)["answer"] == plain(
        server, None, text(4, 12)
    )


def asked(server: Server, name: str) -> float:
    """Requests that this adapter has answered so far."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "graft_requests_total" and sample.labels["adapter"] == name
    )


def test_the_program_of_the_documentation_runs_as_written(server: Server) -> None:
    page = (Path(__file__).parents[2] / "docs/lang.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert "http://127.0.0.1:30000" in program
    before = {name: asked(server, name) for name in (LEGAL, SALES)}
    # A program's source is not looked at, so it need not be in a file.
    exec(program.replace("http://127.0.0.1:30000", server.url), {})
    # A run goes on in a thread of its own.
    wait_until(lambda: all(asked(server, name) >= before[name] + 4 for name in (LEGAL, SALES)))
