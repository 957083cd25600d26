"""/openapi.json, made from the table by which the server also routes and checks requests."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pgasdl.jobs.operations import ID, Operation
from pgasdl.jobs.problems import MEDIA_TYPE, PROBLEM

VERSION = "1"


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the description of the interface by OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace("{id:int}", "{id}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pgasdl job server", "version": VERSION},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    refusals = {*operation.refusals, 500, 507}
    if "{id:int}" in operation.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": ID})
        refusals.add(404)
    if operation.query or operation.method == "POST":
        refusals.add(422)
    if operation.body is not None:
        refusals |= {400, 413, 415}
    if not operation.is_open:
        refusals.add(401)
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters,
        "security": [] if operation.is_open else [{"token": []}],
        "responses": {
            str(operation.status): _answer(operation),
            **{str(status): _refusal(status) for status in sorted(refusals)},
        },
    }
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _answer(operation: Operation) -> dict[str, Any]:
    description = HTTPStatus(operation.status).phrase
    if isinstance(operation.answer, str):
        return {"description": description, "content": {operation.answer: {}}}
    content = {"application/json": {"schema": operation.answer}}
    return {"description": description, "content": content}


def _refusal(status: int) -> dict[str, Any]:
    content = {MEDIA_TYPE: {"schema": PROBLEM}}
    return {"description": HTTPStatus(status).phrase, "content": content}
