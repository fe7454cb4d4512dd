"""What /openapi.json says: the framework's description of the routes, with the bodies that our own reader validates (`body`).

The bodies stand in `components/schemas`, where OpenAPI looks for what a `$ref` names: pydantic's own `$defs` would lie inside
a request body, and references to them resolve to nothing in the document.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest

_BODIES: Final = (ChatRequest, CompletionRequest)
_REF: Final = "#/components/schemas/{model}"


class Application(FastAPI):
    """FastAPI, whose description has our bodies."""

    def openapi(self) -> dict[str, Any]:
        """The document; made once, at the first request for it."""
        if self.openapi_schema is None:
            schemas = super().openapi().setdefault("components", {}).setdefault("schemas", {})
            _, described = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
            schemas.update(described["$defs"])
        return super().openapi()


def request_body(schema: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
    """What a route says of the body that it takes (`openapi_extra`)."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}
