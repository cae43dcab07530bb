"""OpenAI's files and fine-tuning jobs as the stock `openai` SDK asks for them, with no engine to learn with.

What a job learns is tested with a whole run, in tests/e2e/test_fine_tuning.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import runtime
from runtime.gateway.fine_tuning.conversations import MAX_ANSWERS, ConversationError, check_lengths, read
from tests.runtime.gateway_process import TOKEN, Gateway
from tests.support.waiting import wait_until

TINY = Path(runtime.__file__).parent / "tiny" / "model"
SAID = [{"role": "user", "content": "the red cat"}, {"role": "assistant", "content": "le chat rouge"}]


def line(messages: Any = SAID, **fields: Any) -> str:
    return json.dumps({"messages": messages, **fields})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("{", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("[]", "line 1: not a JSON object"),
        (
            line() + "\n" + json.dumps({"prompt": "a", "completion": "b"}),
            "line 2: no messages .*write them as",
        ),
        (line(SAID[:1] * 2), "line 1: there is no assistant message"),
        (line([SAID[0], {**SAID[1], "weight": 0}]), "line 1: there is no assistant message"),
        (line([SAID[0], {**SAID[1], "weight": 0.5}]), "weight is 0 or 1"),
        (line([{"role": "bot", "content": "x"}, SAID[1]]), "role is one of"),
        (line(weird=1), "line 1: weird"),
        (line(functions=[{"name": "f"}]), "write them as tools"),
        (line([SAID[0], *[SAID[1]] * (MAX_ANSWERS + 1)]), "split it"),
    ],
)
def test_a14_a_file_that_cannot_be_learned_from_is_refused_with_its_line(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConversationError, match=why):
        read(tmp_path / "file")


def test_a14_a_line_ends_where_json_lines_end_and_nowhere_else(tmp_path: Path) -> None:
    odd = [{"role": "user", "content": "a\u2028b\x85c"}, SAID[1]]
    text = "\n".join([json.dumps({"messages": odd}, ensure_ascii=False), "", line(parallel_tool_calls=True)])
    (tmp_path / "file").write_text(text)
    assert [example.messages[0]["content"] for example in read(tmp_path / "file")] == [
        "a\u2028b\x85c", "the red cat",
    ]  # fmt: skip


@pytest.mark.parametrize("escaped", [False, True])
def test_r02_a_line_is_measured_by_what_an_engine_would_be_given(escaped: bool) -> None:
    """Not by how it is written: as escapes a character takes up to twelve bytes, as UTF-8 up to four."""
    fits, beyond = ("я" * (16 * 512 - len("messagesrolecontent") * 2) for _ in range(2))
    beyond += "я" * 100

    def written(text: str, **fields: Any) -> bytes:
        said = {"messages": [{"role": "", "content": text}], **fields}
        return json.dumps(said, ensure_ascii=escaped).encode()

    check_lengths(b"\n".join([written(fits), b"", written(fits, metadata={"a": beyond})]), 512)
    for text in (written(beyond), b"x" * (16 * 512 + 1), b"[" * (16 * 512 + 1)):
        with pytest.raises(ConversationError, match=r"line 3: \d+ characters, and the context of 512"):
            check_lengths(b"\n".join([written(fits), b"", text]), 512)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    settings = {"engine": {"max_model_len": 512}}
    running = Gateway(tmp_path_factory.mktemp("gateway"), None, TINY, **settings)
    yield running
    running.stop()


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    transport = httpx.HTTPTransport(uds=gateway.config["socket_dir"] + "/gateway.sock")
    http = httpx.Client(transport=transport, timeout=60)
    return openai.OpenAI(base_url="http://x/v1", api_key=TOKEN, http_client=http, max_retries=0)


def uploaded(client: openai.OpenAI, text: str) -> str:
    return client.files.create(file=("mine.jsonl", text.encode()), purpose="fine-tune").id


@pytest.mark.slow
def test_a14_r08_files_are_kept_listed_read_back_and_deleted(client: openai.OpenAI, gateway: Gateway) -> None:
    first = client.files.create(file=("../../etc/mine.jsonl", line().encode()), purpose="fine-tune")
    assert (first.filename, first.bytes, first.status) == ("mine.jsonl", len(line()), "processed")
    second = uploaded(client, line())
    assert {first.id, second} <= {one.id for one in client.files.list()}
    assert [one.id for one in client.files.list(limit=1, after=client.files.list().data[0].id)][:1]
    gateway.kill()
    gateway.start()
    assert client.files.content(first.id).read() == line().encode()
    assert client.files.delete(first.id).deleted
    for gone in (first.id, "file-" + "0" * 24, "../runtime.json"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(gone)
    with pytest.raises(openai.BadRequestError, match="fine-tune"):
        client.files.create(file=("a", b"x"), purpose="assistants")
    left = sorted(path.name for path in (gateway.folder / "files").iterdir())
    assert f"{second}.data" in left and not any(first.id in name for name in left)


@pytest.mark.slow
def test_r02_a_line_that_no_context_holds_is_refused_at_the_upload(
    client: openai.OpenAI, gateway: Gateway
) -> None:
    kept = {one.id for one in client.files.list()}
    long = line([SAID[0], SAID[1] | {"content": "chat " * 4_000_000}])
    with pytest.raises(openai.BadRequestError, match=r"line 2: 20000\d+ characters") as refused:
        uploaded(client, "\n".join([line(), long, line()]))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "file")
    assert {one.id for one in client.files.list()} == kept
    many = "\n".join([line()] * 200_000)  # as long, of lines that are not
    assert client.files.retrieve(uploaded(client, many)).bytes == len(many) > 20_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"training_file": "file-none"}, "no such file"),
        ({"model": "gpt-4o-mini"}, "does not exist"),
        ({"method": {"type": "dpo"}}, "only supervised"),
        ({"hyperparameters": {"n_epochs": 0}}, "n_epochs"),
        ({"hyperparameters": {"learning_rte": 1}}, "learning_rte"),
    ],
)
def test_a14_a_job_that_means_nothing_here_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], what: str
) -> None:
    asked = {"model": "policy", "training_file": uploaded(client, line()), **fields}
    with pytest.raises(openai.APIStatusError, match=what):
        client.fine_tuning.jobs.create(**asked)


@pytest.mark.slow
def test_a14_a_job_fails_by_its_file_and_takes_no_further_step_once_it_is_cancelled(
    client: openai.OpenAI, gateway: Gateway
) -> None:
    bad = client.fine_tuning.jobs.create(model="policy", training_file=uploaded(client, line() + "\n{"))
    wait_until(lambda: client.fine_tuning.jobs.retrieve(bad.id).status == "failed")
    failed = client.fine_tuning.jobs.retrieve(bad.id)
    assert failed.error and failed.error.message and "line 2: not JSON" in failed.error.message
    with pytest.raises(openai.BadRequestError, match="has failed"):
        client.fine_tuning.jobs.cancel(bad.id)

    # There is no engine that could render it: the job runs, and waits.
    job = client.fine_tuning.jobs.create(
        model="policy", training_file=uploaded(client, "\n".join([line()] * 9)), suffix="mine",
        hyperparameters={"n_epochs": 2, "batch_size": "auto"}, validation_file=uploaded(client, line()),
    )  # fmt: skip
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 8)
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled" == client.fine_tuning.jobs.cancel(job.id).status
    said = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert any("suffix" in text for text in said) and any("validation_file" in text for text in said)
    assert client.fine_tuning.jobs.checkpoints.list(job.id).data == []
    assert [one.id for one in client.fine_tuning.jobs.list(limit=1)][:2] == [job.id, bad.id]
    gateway.kill()
    gateway.start()
    assert client.fine_tuning.jobs.retrieve(job.id).status == "cancelled"
    # What was taken in before the cancel, one step at most, and none after it.
    assert len(gateway.http.get("/slipway/steps").json()) <= 1
