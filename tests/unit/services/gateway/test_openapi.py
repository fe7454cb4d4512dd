"""/openapi.json, read as a strict reader does: every reference is a JSON pointer into the document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.services.gateway.line import Line


def references(node: Any) -> Iterator[str]:
    """Every `$ref` and every target of a discriminator below `node`."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        mapping = node.get("discriminator", {}).get("mapping") if "oneOf" in node else None
        yield from (mapping or {}).values()
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(document: Any, reference: str) -> Any:
    """What a local JSON pointer (RFC 6901) names; KeyError when there is nothing."""
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        document = document[part.replace("~1", "/").replace("~0", "~")]
    return document


async def test_every_reference_resolves(line: Line) -> None:
    document = (await line.client.get("/openapi.json")).json()
    found = list(references(document))
    assert len(found) > 20
    for reference in found:
        assert resolve(document, reference)["type"]


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")]
)
async def test_a_generation_tells_its_body(line: Line, path: str, field: str) -> None:
    document = (await line.client.get("/openapi.json")).json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert field in resolve(document, body["$ref"])["required"]
    assert "$defs" not in str(document)
