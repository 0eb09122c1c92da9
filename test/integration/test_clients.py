"""Clients of OpenAI, vLLM and SGLang on one server, unchanged."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny_model
from adapter_root import put
from documents import ROOT, blocks, run_as_written
from harness import STRICT, Request, Server, greedy, serve, wait_until
from reference import Reference, difference

pytestmark = pytest.mark.server

BASE = "served"
PROMPT = tiny_model.prompt(40, seed=8)
TEXT = " ".join(map(tiny_model.word, PROMPT))
NEW = 12
OK, BAD_REQUEST, NOT_FOUND = 200, 400, 404
KINDS = {"legal": "all-r16", "team/sales": "patterns", "x:y": "q-r4", "chatty": "odd-r5"}
NAMES = sorted(KINDS)

# Says the first message twice, so that prompts show which template made them.
TWICE = "{% for m in messages %}{{ m.content }} {{ m.content }} {% endfor %}"
THRICE = "{% for m in messages %}{{ m.content }} {{ m.content }} {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> Path:
    """The root: `ondemand` and `spoilt` lie there, and what the tests load by hand."""
    root = tmp_path_factory.mktemp("root")
    for name, kind in KINDS.items():
        put(root / "loaded" / name.replace("/", "-").replace(":", "-"), adapters[kind])
    with_template(root / "loaded/chatty", TWICE)
    with_template(put(root / "ondemand", adapters["bf16"]), TWICE)
    with_template(put(root / "spoilt", adapters["bf16"]), "{% for %}")
    return root


@pytest.fixture(scope="module")
def server(
    base_model: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ("--page-size", "16", "--max-total-tokens", "16384", "--served-model-name", BASE)
    flags += ("--graft-adapter-root", str(folders), "--graft-adapter-scan-seconds", "0.2")
    given = {name: folder_of(folders, name) for name in NAMES}
    with serve(
        base_model, tmp_path_factory.mktemp("server"), *flags, adapters=given, env=STRICT
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def folder_of(root: Path, name: str) -> Path:
    return root / "loaded" / name.replace("/", "-").replace(":", "-")


def with_template(folder: Path, text: str) -> Path:
    (folder / "chat_template.jinja").write_text(text)
    return folder


def wanted(reference: Reference, name: str | None, prompt: tuple[int, ...] = PROMPT) -> str:
    """What an adapter answers, as text."""
    kind = KINDS.get(name, name) if name else None
    tokens = reference.answer(kind, prompt, NEW).tokens
    return " ".join(map(tiny_model.word, tokens))


def fields(form: str, name: str) -> dict[str, Any]:
    """A request's fields that name an adapter, in one of the forms."""
    return {
        "model": {"model": name},
        "base:model": {"model": f"{BASE}:{name}"},
        "lora_path": {"model": BASE, "lora_path": name},
        "lora_name": {"model": BASE, "lora_name": name},
        "both": {"model": name, "lora_path": name, "lora_name": name},
    }[form]


FORMS = ("model", "base:model", "lora_path", "lora_name", "both")


def split(given: dict[str, Any]) -> dict[str, Any]:
    """The same for the OpenAI client, which sends other servers' fields as `extra_body`."""
    model = given.pop("model")
    return {"model": model, "extra_body": {"ignore_eos": True, **given}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_chat_completions(
    client: openai.OpenAI, reference: Reference, form: str, stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    for name in ("legal", "team/sales", "x:y"):
        given = split(fields(form, name))
        answer: Any = client.chat.completions.create(
            messages=messages, temperature=0, max_tokens=NEW, stream=stream, **given
        )
        if stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            models = {chunk.model for chunk in chunks}
        else:
            text, models = answer.choices[0].message.content, {answer.model}
        assert text.split() == wanted(reference, name).split()
        assert models == {given["model"] if form in ("model", "base:model") else name}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_completions(client: openai.OpenAI, reference: Reference, form: str, stream: bool) -> None:
    for name in ("legal", "team/sales", "x:y"):
        given = split(fields(form, name))
        answer: Any = client.completions.create(
            prompt=TEXT, temperature=0, max_tokens=NEW, stream=stream, **given
        )
        chunks = list(answer) if stream else [answer]
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text.split() == wanted(reference, name).split()
        assert {c.model for c in chunks} == {
            given["model"] if form in ("model", "base:model") else name
        }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_generate(server: Server, reference: Reference, form: str, stream: bool) -> None:
    for name in ("legal", "x:y"):
        body = {"input_ids": list(PROMPT), "sampling_params": greedy(NEW), "stream": stream}
        response = server.post("/generate", body | fields(form, name))
        assert response.status_code == OK, response.text
        answer = events(response)[-1] if stream else response.json()
        truth = reference.answer(KINDS[name], PROMPT, NEW)
        assert difference(answer["output_ids"], truth) is None
        assert answer["meta_info"]["adapter"] == name


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """What a stream on /generate sent."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("form", FORMS)
def test_the_other_routes(server: Server, reference: Reference, form: str) -> None:
    named = fields(form, "legal")
    truth = wanted(reference, "legal").split()
    more = {"ignore_eos": True, "temperature": 0, "max_tokens": NEW}
    chat = {"messages": [{"role": "user", "content": TEXT}], **more, **named}
    answer = server.post("/invocations", chat).json()
    assert answer["choices"][0]["message"]["content"].split() == truth
    answer = server.post("/v1/messages", chat).json()
    assert answer["content"][0]["text"].split() == truth
    assert answer["model"] == (named["model"] if form in ("model", "base:model") else "legal")
    streamed = server.post("/v1/messages", chat | {"stream": True}).text
    deltas = re.findall(r'"text":\s?"([^"]*)"', streamed)
    assert "".join(deltas).split() == truth
    vertex = {
        "instances": [{"text": TEXT}],
        "parameters": {"sampling_params": greedy(NEW)} | named,
    }
    (answer,) = server.post("/vertex_generate", vertex).json()
    assert answer["text"].split() == truth
    assert answer["meta_info"]["adapter"] == "legal"


def test_batches_name_each_adapter(server: Server, reference: Reference) -> None:
    names = ["legal", None, "x:y"]
    answers = server.ask_batch([Request(name, PROMPT, NEW) for name in names])
    assert [answer["meta_info"]["adapter"] for answer in answers] == names
    body = {"text": TEXT, "sampling_params": greedy(NEW, n=2), "model": "legal"}
    for answer in server.generate(body):
        assert answer["meta_info"]["adapter"] == "legal"
        assert answer["text"].split() == wanted(reference, "legal").split()
    answer = server.post(
        "/v1/completions",
        {"prompt": [TEXT, TEXT], "lora_path": ["legal", "x:y"], "max_tokens": NEW}
        | {"temperature": 0, "ignore_eos": True},
    ).json()
    texts = [choice["text"].split() for choice in answer["choices"]]
    assert texts == [wanted(reference, name).split() for name in ("legal", "x:y")]


@pytest.mark.parametrize("model", [BASE, "default", ""])
def test_the_base_model(server: Server, reference: Reference, model: str) -> None:
    body = {"prompt": TEXT, "model": model, "max_tokens": NEW, "temperature": 0}
    answer = server.post("/v1/completions", body | {"ignore_eos": True}).json()
    assert answer["choices"][0]["text"].split() == wanted(reference, None).split()
    assert answer["model"] == model
    native = {"input_ids": list(PROMPT), "sampling_params": greedy(NEW), "model": model}
    assert server.generate(native)["meta_info"]["adapter"] is None


ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "w1", "sampling_params": greedy(2)},
    "/v1/completions": {"prompt": "w1", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/invocations": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "w1"}]},
    "/v1/embeddings": {"input": "w1"},
    "/tokenize": {"prompt": "w1"},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "w1"}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_fields_that_disagree_are_400(server: Server, route: str, stream: bool) -> None:
    body = ROUTES[route] | ({"stream": True} if stream else {})
    for given in (
        {"model": "legal", "lora_name": "x:y"},
        {"model": f"{BASE}:legal", "lora_path": "x:y"},
        {"model": BASE, "lora_path": "legal", "lora_name": "x:y"},
    ):
        response = server.post(route, body | given)
        assert response.status_code == BAD_REQUEST, response.text
        assert "'legal'" in response.text
        assert "'x:y'" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_c133_unknown_names_are_404_with_the_list(server: Server, route: str, stream: bool) -> None:
    body = ROUTES[route] | ({"stream": True} if stream else {})
    for given in (
        {"model": "lega"},
        {"model": f"{BASE}:lega"},
        {"model": "other:legal"},
        {"model": BASE, "lora_path": "lega"},
        {"model": BASE, "lora_name": "lega"},
    ):
        response = server.post(route, body | given)
        assert response.status_code == NOT_FOUND, (given, response.text)
        assert "chatty, legal, team/sales, x:y" in response.text


def test_the_openai_client_sees_its_own_errors(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "w1"}]
    with pytest.raises(openai.NotFoundError, match="legal"):
        client.chat.completions.create(model="lega", messages=messages)
    with pytest.raises(openai.NotFoundError, match="legal"):
        client.chat.completions.create(model="lega", messages=messages, stream=True)
    with pytest.raises(openai.BadRequestError, match="x:y"):
        client.completions.create(model="legal", prompt="w1", extra_body={"lora_name": "x:y"})
    with pytest.raises(openai.NotFoundError, match="legal"):
        client.models.retrieve("lega")


def test_c136_the_list_is_what_is_usable(
    client: openai.OpenAI, base_model: Path, folders: Path
) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert cards.keys() == {BASE, "ondemand", *(below(folders, name) for name in NAMES), *NAMES}
    assert (cards[BASE]["root"], cards[BASE]["parent"]) == (str(base_model), None)
    for name in NAMES:
        assert cards[name]["parent"] == BASE
        assert cards[name]["root"] == str(folder_of(folders, name))
        assert client.models.retrieve(name).model_dump() | {"created": 0} == cards[name] | {
            "created": 0
        }
    messages: Any = [{"role": "user", "content": "w1"}]
    for name in cards:
        client.chat.completions.create(model=name, messages=messages, max_tokens=1)


def below(root: Path, name: str) -> str:
    return str(folder_of(root, name).relative_to(root))


def load(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", body)


def unload(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/unload_lora_adapter", body)


def test_vllms_loads_and_unloads(server: Server, folders: Path, reference: Reference) -> None:
    legal, sales = str(folder_of(folders, "legal")), str(folder_of(folders, "team/sales"))
    response = load(server, lora_name="new", lora_path=legal)
    assert (response.status_code, response.headers["content-type"][:10]) == (OK, "text/plain")
    assert response.text == "Success: LoRA adapter 'new' added successfully."
    assert answer_of(server, "new") == wanted(reference, "legal").split()
    for path in (legal, sales):  # the same path too: vLLM's clients look at the list first
        response = load(server, lora_name="new", lora_path=path)
        assert response.status_code == BAD_REQUEST
        error = response.json()["error"]
        assert "'new' has already been loaded" in error["message"]
        assert (error["type"], error["code"]) == ("BadRequestError", BAD_REQUEST)
    response = load(server, lora_name="new", lora_path=sales, load_inplace=True)
    assert response.status_code == OK, response.text
    assert answer_of(server, "new") == wanted(reference, "team/sales").split()
    for _ in range(2):
        response = unload(server, lora_name="new", lora_int_id=3)
        assert response.status_code == OK
        assert response.text == "Success: LoRA adapter 'new' removed successfully."
        assert server.get("/v1/models/new").status_code == NOT_FOUND
    assert unload(server, lora_name="never there").status_code == OK


def answer_of(server: Server, model: str) -> list[str]:
    body = {"prompt": TEXT, "model": model, "max_tokens": NEW, "temperature": 0}
    response = server.post("/v1/completions", body | {"ignore_eos": True})
    assert response.status_code == OK, response.text
    words: list[str] = response.json()["choices"][0]["text"].split()
    return words


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "lora_name"),
        ({"lora_name": "new"}, "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "new", "lora_path": "/nowhere"}, "--graft-adapter-root"),
        ({"lora_name": BASE, "lora_path": "/nowhere"}, "base model"),
        ({"lora_name": f"{BASE}:legal", "lora_path": "/nowhere"}, "base model"),
        ({"lora_name": "default:legal", "lora_path": "/nowhere"}, "base model"),
    ],
)
def test_vllms_wrong_loads_are_400(server: Server, body: dict[str, Any], reason: str) -> None:
    response = load(server, **body)
    assert response.status_code == BAD_REQUEST
    assert reason in response.text
    native = server.post("/load_lora_adapter", body)
    assert native.status_code == BAD_REQUEST


def chat_prompt(server: Server, model: str, content: str = TEXT, **more: Any) -> int:
    """How many tokens the messages became, by every route that renders them."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
    chat = server.post("/v1/chat/completions", body | {"max_tokens": 1})
    assert chat.status_code == OK, chat.text
    counts = {
        chat.json()["usage"]["prompt_tokens"],
        server.post("/v1/tokenize", body).json()["count"],
        server.post("/v1/messages/count_tokens", body).json()["input_tokens"],
    }
    usage = server.post("/v1/messages", body | {"max_tokens": 1}).json()["usage"]
    counts.add(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))
    (count,) = counts
    return int(count)


def test_an_adapters_own_template_wins(server: Server, reference: Reference) -> None:
    once = len(PROMPT)
    assert chat_prompt(server, BASE) == chat_prompt(server, "legal") == once
    assert chat_prompt(server, "chatty") == chat_prompt(server, f"{BASE}:chatty") == 2 * once
    assert chat_prompt(server, BASE, lora_name="chatty") == 2 * once
    assert chat_prompt(server, "ondemand") == 2 * once
    body = {"model": "chatty", "messages": [{"role": "user", "content": TEXT}], "temperature": 0}
    answer = server.post(
        "/v1/chat/completions", body | {"max_tokens": NEW, "ignore_eos": True}
    ).json()
    truth = wanted(reference, "chatty", PROMPT * 2).split()
    assert answer["choices"][0]["message"]["content"].split() == truth
    own = {"chat_template_kwargs": {"chat_template": "w1 w2 w3"}}
    response = server.post("/v1/chat/completions", body | {"max_tokens": 1} | own)
    assert response.json()["usage"]["prompt_tokens"] == 3  # the request's own goes first


def test_templates_are_replaced_and_go_with_their_adapter(server: Server, folders: Path) -> None:
    once = len(PROMPT)
    chatty, legal = str(folder_of(folders, "chatty")), str(folder_of(folders, "legal"))
    thrice = with_template(shutil.copytree(chatty, folders / "loaded/thrice"), THRICE)
    for path, times in ((legal, 1), (chatty, 2), (str(thrice), 3), (legal, 1)):
        response = load(server, lora_name="changing", lora_path=path, load_inplace=True)
        assert response.status_code == OK, response.text
        assert chat_prompt(server, "changing") == times * once
    assert unload(server, lora_name="changing").status_code == OK
    assert load(server, lora_name="changing", lora_path=chatty).status_code == OK
    assert chat_prompt(server, "changing") == 2 * once
    assert unload(server, lora_name="changing").status_code == OK


def test_a_template_that_changes_in_its_folder_is_followed(
    server: Server, folders: Path, adapters: dict[str, Path]
) -> None:
    assert chat_prompt(server, "ondemand") == 2 * len(PROMPT)

    def follows(times: int) -> None:
        body = {"model": "ondemand", "messages": [{"role": "user", "content": TEXT}]}
        wanted = times * len(PROMPT)
        wait_until(lambda: server.post("/v1/tokenize", body).json().get("count") == wanted)
        assert chat_prompt(server, "ondemand") == wanted

    with_template(folders / "ondemand", THRICE)
    follows(3)
    put(folders / "ondemand", adapters["bf16"])
    follows(1)
    with_template(folders / "ondemand", TWICE)
    follows(2)


BROKEN = {
    "syntax": ("{% for m in messages %}{{ m.content }", "chat_template"),
    "filter": ("{{ messages | nonsense }}", "nonsense"),
    "nesting": ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "chat_template"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_template_is_refused_at_load(server: Server, folders: Path, kind: str) -> None:
    text, reason = BROKEN[kind]
    folder = shutil.copytree(folder_of(folders, "legal"), folders / "loaded" / f"broken-{kind}")
    with_template(folder, text)
    for route in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        response = server.post(route, {"lora_name": "broken", "lora_path": str(folder)})
        assert response.status_code == BAD_REQUEST
        assert reason in response.text
    assert server.get("/v1/models/broken").status_code == NOT_FOUND


def test_a_broken_template_below_the_root_is_not_listed(server: Server) -> None:
    assert server.get("/v1/models/spoilt").status_code == NOT_FOUND
    for route in ("/v1/chat/completions", "/v1/messages", "/generate"):
        response = server.post(route, ROUTES[route] | {"model": "spoilt"})
        assert response.status_code == BAD_REQUEST, response.text
        assert "chat_template" in response.text


RAISING = {
    "its own error": "{{ raise_exception('only haiku') }}",
    "a number": "{{ 1 // 0 }}",
    "an attribute": "{{ messages[0].content.nothing.more }}",
    "the sandbox": "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
    "too much": "{% for i in range(999999999) %}{% endfor %}",
}


@pytest.mark.parametrize("kind", RAISING)
def test_a_template_that_fails_is_400_at_the_request(
    server: Server, folders: Path, kind: str
) -> None:
    name = f"raising-{kind.replace(' ', '-')}"
    folder = shutil.copytree(folder_of(folders, "legal"), folders / "loaded" / name)
    with_template(folder, RAISING[kind])
    assert load(server, lora_name="raising", lora_path=str(folder)).status_code == OK
    for route in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        response = server.post(route, ROUTES[route] | {"model": "raising"})
        assert response.status_code == BAD_REQUEST, response.text
        assert response.json()["error" if "messages" in route else "message"]
    assert server.post("/v1/completions", {"prompt": "w1", "model": "raising"}).status_code == OK
    assert unload(server, lora_name="raising").status_code == OK


def test_the_curl_lines_of_the_docs_run_as_written(
    server: Server, folders: Path, tmp_path: Path
) -> None:
    found = [block for block in blocks("docs/clients.md") if "curl" in block]
    assert len(found) >= 5
    for block in found:
        assert run_as_written(server, block, tmp_path, ADAPTERS=str(folders / "loaded")).strip()


def test_the_lines_for_several_replicas_run_as_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a router: what clients send is what one replica takes."""
    (request,) = [block for block in blocks("docs/deploy.md") if "curl" in block]
    printed = run_as_written(server, request, tmp_path, hosts=["router:8000"])
    assert json.loads(printed)["model"] == "legal"
    (program,) = blocks("docs/deploy.md", "python")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    made = eval(program, {"OpenAI": openai.OpenAI})
    assert str(made.base_url) == "http://router:8000/v1/"
    with made.copy(base_url=f"{server.url}/v1") as client:
        answer = client.completions.create(model="legal", prompt="w1", max_tokens=1)
        assert client.default_headers["X-SMG-Routing-Key"] == answer.model == "legal"


def test_the_line_for_trouble_runs_as_written(server: Server, tmp_path: Path) -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    (line,) = re.findall(r"`(curl [^`]+)`", text)
    printed = run_as_written(server, line, tmp_path, hosts=["HOST:30000"])
    assert json.loads(printed)["state"] == "ready"
