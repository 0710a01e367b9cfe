"""A chat template that loops or asks for gigabytes takes nothing from the server."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_gguf
from support.scripted import scripted_llm, scripted_model, serving
from support.serving import MAIN, Served, read_summary, serve, tiny_model
from support.threads import together, until

from kvarn.errors import KvarnError
from kvarn.server.templates import TemplateProcess
from kvarn.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "h\u00e4 <\U0001f999>"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLING = "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.fixture
def process() -> Iterator:
    made: list[TemplateProcess] = []

    def make(source: str, seconds: float = 5.0) -> TemplateProcess:
        made.append(TemplateProcess(source, "<s>", "</s>", seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_renders_what_a_template_renders(process) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m|tojson }}{% endfor %}{{ extra }}"
    here, there = ChatTemplate(source, "<s>", "</s>"), process(source)
    for messages in (MESSAGES, [], MESSAGES * 500, [{"role": "user", "content": "x" * 3_000_000}]):
        assert there.render(messages, extra=[1, None, "\u2028"]) == here.render(messages, extra=[1, None, "\u2028"])


def test_errors_are_those_of_a_template(process) -> None:
    for source in ("{{ messages[5].role.x }}", "{{ raise_exception('no\\nsystem') }}", "{{ 1 // 0 }}", "{% if %}"):
        with pytest.raises(KvarnError) as expected:
            ChatTemplate(source).render(MESSAGES)
        with pytest.raises(KvarnError) as error:
            process(source).render(MESSAGES)
        assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("source", [LOOP, RECURSIVE])
def test_a_template_that_loops_is_ended(process, source: str) -> None:
    template = process("{% if messages %}" + source + "{% endif %}fine", seconds=0.2)
    for _ in range(2):
        with pytest.raises(KvarnError, match=r"took more than 0.2 s on these messages: use another model"):
            template.render(MESSAGES)
        assert template.render([]) == "fine", "the next call has a new process"


@pytest.mark.parametrize("source", ["{{ ('a' * 3000000000)|length }}", DOUBLING, "{{ 'a'.ljust(10 ** 10)|length }}"])
def test_a_template_that_asks_for_gigabytes_is_refused(process, source: str) -> None:
    template = process("{% if messages %}" + source + "{% endif %}fine", seconds=60)
    with pytest.raises(KvarnError, match="chat template"):
        template.render(MESSAGES)
    assert template.render([]) == "fine"


def test_a_text_beyond_the_limit_is_refused(process) -> None:
    template = process("{% if messages %}{{ 'a' * 70000000 }}{% endif %}fine", seconds=60)
    with pytest.raises(KvarnError, match=r"wrote 7000.... bytes; the limit is 67108864"):
        template.render(MESSAGES)
    assert template.render([]) == "fine"


def test_a_process_that_was_killed_is_replaced(process) -> None:
    template = process("{{ messages[0].content }}")
    template.start()
    template._child.kill()
    with pytest.raises(KvarnError, match="ended its process"):
        template.render(MESSAGES)
    assert template.render(MESSAGES) == MESSAGES[0]["content"]


def test_closing_ends_the_call_under_way(process) -> None:
    template = process(LOOP, seconds=600)

    def close() -> None:
        until(lambda: template._child is not None)
        template.close()

    error, _ = together(lambda: template.render(MESSAGES), close)
    assert isinstance(error, KvarnError)


def test_several_threads_get_their_own_texts(process) -> None:
    template = process("{{ messages[0].content }}")
    asked = [f"number {i}" * 1000 for i in range(8)]
    assert together(*(lambda t=t: template.render([{"content": t}]) for t in asked)) == asked


# -- the server ------------------------------------------------------------------------------------------------------


def looping_model(folder: Path) -> Path:
    return tiny_gguf.write(folder / "loop.gguf", "llama", LOOP)


def test_a_looping_template_does_not_stop_the_server(tmp_path: Path) -> None:
    """Twelve chats wait for the template; other requests are answered meanwhile, and SIGTERM ends the process."""
    with serve(looping_model(tmp_path), "--drain-seconds", "0.5") as server:
        chat = {"messages": MESSAGES, "max_tokens": 2}
        chats = [server.post(chat, path="/v1/chat/completions") for _ in range(12)]
        for _ in range(3):
            assert server.ask("/v1/completions", {"prompt": "ab", "max_tokens": 2}).status == 200
            assert server.ask("/tokenize", {"prompt": "ab"}).status == 200
            assert server.ask("/health").status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        for each in chats:
            each.leave()


def test_sigterm_ends_a_process_whose_threads_do_not(tmp_path: Path) -> None:
    """A thread of the server never comes back: the process ends all the same, with an error."""
    stuck = f"""
import time
from kvarn.server import serving
from kvarn.server.prompts import Prompts
serving.GRACE_SECONDS = 0.5
Prompts.plain = lambda self, prompt, call: time.sleep(10000)
{MAIN}
"""
    command = [sys.executable, "-c", stuck, "serve", "-m", str(tiny_model(tmp_path)), "--port", "0"]
    command += ["--drain-seconds", "0.2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        server = Served(process, read_summary(process, process.stderr))
        with server.post({"prompt": "ab", "max_tokens": 2}):
            assert server.ask("/health").status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
        assert "the server did not stop 0.5 s after its drain time: it ends now" in process.stderr.read()


def test_a_model_without_a_chat_template_names_what_to_use(tmp_path: Path) -> None:
    with serving(scripted_llm(scripted_model(tmp_path / "tiny.gguf", ""), {})) as client:
        reply = client.ask(messages=[{"role": "user", "content": "hi"}])
    assert (reply.status, "use /v1/completions" in reply.json["error"]["message"]) == (400, True)
