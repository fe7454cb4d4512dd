"""A stack whose spans go to an OTLP receiver, and whose model has a chat template with faults that a caller can ask for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx
import pytest

from services.embedded.waiting import until
from shared.clock import SYSTEM
from shared.config import POCKET
from shared.telemetry import TRACES_FILE
from tests.e2e.conftest import Line, running
from tests.otlp import Receiver, receiving

RENDER_S = 0.5
FAULTY = {
    "raises": (
        "{{ raise_exception('roles must take turns') }}",
        "the chat template refused: roles must take turns",
    ),
    "unknown": ("{{ messages[0].owner.name }}", "the chat template failed: UndefinedError"),
    "divides": ("{{ messages | length // 0 }}", "the chat template failed: ZeroDivisionError"),
    "loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "the chat template took too long",
    ),
    "writes": ("{% for a in range(9999) %}{{ messages[0].content * 9999 }}{% endfor %}", "context window is"),
    "repeats": ("{{ messages[0].content * 10**10 }}", "would be too large"),
}
"""What the template does when a conversation begins with this word, and what the caller is told."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Line, Receiver]]:
    folder = tmp_path_factory.mktemp("models") / "faulty"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("recipe", "heldout", "results", "*.py"))
    template = folder / "chat_template.jinja"
    faults = "".join(
        f"{{% if messages[0].content == '{word}' %}}{fault}{{% endif %}}"
        for word, (fault, _) in FAULTY.items()
    )
    template.write_text(faults + template.read_text())
    with (
        receiving() as server,
        running(
            "--model",
            str(folder),
            BURSTLINE_OTLP_ENDPOINT=server.url,
            BURSTLINE_GATEWAY_RENDER_TIMEOUT_S=str(RENDER_S),
        ) as line,
    ):
        yield line, server


def asked(line: Line, text: str) -> httpx.Response:
    body = {"model": "faulty", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    with line.client() as client:
        return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("word", FAULTY)
def test_fr_63_a_faulty_template_is_a_400_that_says_so_and_holds_nobody_up(
    stack: tuple[Line, Receiver], word: str
) -> None:
    line, _ = stack
    began = SYSTEM.monotonic_ns()
    refused = asked(line, word)
    assert SYSTEM.monotonic_ns() - began < (RENDER_S + 5.0) * 1e9
    assert refused.status_code == 400, refused.text
    assert FAULTY[word][1] in refused.json()["error"]["message"]
    assert asked(line, "Hi").status_code == 200


def test_a_receiver_has_whole_traces_of_every_service(stack: tuple[Line, Receiver]) -> None:
    line, server = stack
    answer = asked(line, "A prompt of more than one block, so that the broker is asked too. " * 20)
    assert answer.status_code == 200, answer.text
    trace_id = answer.headers["x-trace-id"]

    def spans() -> dict[str, tuple[str, str, str]]:
        """By id: the parent's id, the service, the name."""
        return {
            span.span_id.hex(): (
                span.parent_span_id.hex(),
                next(
                    one.value.string_value for one in group.resource.attributes if one.key == "service.name"
                ),
                span.name,
            )
            for request in tuple(server.requests)
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        }

    def whole() -> bool:
        found = spans()
        roots = [one for one in found.values() if not one[0]]
        return (
            {service for _, service, _ in found.values()} == {"gateway", "worker", "broker"}
            and len(roots) == 1
            and all(not parent or parent in found for parent, _, _ in found.values())
        )

    assert until(whole, timeout_s=30), sorted(spans().values())
    assert not (line.folder / TRACES_FILE).exists(), "spans go to one place"
