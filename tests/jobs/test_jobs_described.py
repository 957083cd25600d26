"""Whatever is asked of each operation in /openapi.json, the answer is one that stands there."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs_harness import Server, ask

OPERATIONS = (
    "submit", "list", "show", "stop", "restart", "log", "events", "send", "metrics",
    "commands", "report", "history", "ranks", "records", "watch", "openmetrics", "livez", "readyz",
    "openapi",
)  # fmt: skip
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a job that runs, which these tests may stop and restart."""
    server = Server(tmp_path_factory.mktemp("busy"))
    server.start()
    server.submit(ranks=2, grace=0)
    yield server
    server.close()


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values by a schema, for the most part."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | ANY
    kind = schema["type"]
    if kind == "integer":
        edges = (schema["minimum"] - 1, schema["minimum"], schema["maximum"], schema["maximum"] + 1)
        return st.sampled_from(edges) | st.integers() | ANY
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=4) | ANY
    if kind == "object":
        named = {name: values(inner) for name, inner in schema.get("properties", {}).items()}
        required = {name: named.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=named) | st.fixed_dictionaries(
            {}, optional=required | named | {"other": ANY}
        )
    return st.text(max_size=8) | ANY


def conforms(value: object, schema: dict[str, Any]) -> bool:
    """Whether a document is as a schema says; the schemas of answers need no more than this."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not isinstance(
        value, tuple(TYPES[kind] for kind in kinds) if len(kinds) > 1 else TYPES[kinds[0]]
    ):
        return False
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        inner = [(entry, known.get(name, others)) for name, entry in value.items()]
        return set(schema.get("required", ())) <= set(value) and all(
            one is True or (one is not False and conforms(entry, one)) for entry, one in inner
        )
    if isinstance(value, list):
        return all(conforms(entry, schema["items"]) for entry in value)
    return value in schema.get("enum", [value])


def send(server: Server, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
    """The status, the media type and the beginning of an answer, which may have no end."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    kind = answer.headers["Content-Type"].partition(";")[0]
    data = answer.read1(65536) if kind == "text/event-stream" else answer.read()
    connection.close()
    return answer.status, kind, data


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_operation(busy: Server, name: str, data: st.DataObject) -> None:
    description = ask(busy, "GET", "/openapi.json")[2]
    ((method, path, operation),) = (
        (method.upper(), path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if operation["operationId"] == name
    )
    query: dict[str, Any] = {}
    for parameter in operation["parameters"]:
        value = data.draw(st.just(1) | values(parameter["schema"]), parameter["name"])
        if parameter["in"] == "path":
            number = value if isinstance(value, int) and not isinstance(value, bool) else 1
            path = path.replace("{id}", str(number))
        elif data.draw(st.booleans()):
            query[parameter["name"]] = value
    body = None
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = json.dumps(data.draw(values(schema), "body")).encode()
    words = urlencode(query, errors="replace")
    status, kind, answer = send(busy, method, f"{path}?{words}" if words else path, body)
    told = operation["responses"].get(str(status))
    assert told is not None, f"{status}: {answer[:500]!r}"
    schema = told["content"][kind].get("schema")
    assert schema is None or conforms(json.loads(answer), schema), answer
    if status == 422:
        assert json.loads(answer)["detail"]


def test_the_list_above_is_whole(busy: Server) -> None:
    paths = ask(busy, "GET", "/openapi.json")[2]["paths"]
    there = {
        operation["operationId"] for methods in paths.values() for operation in methods.values()
    }
    assert there == set(OPERATIONS)


def test_the_log_of_faults_is_empty(busy: Server, tmp_path: Path) -> None:
    """After all of that the server ends in order, and has told no fault."""
    assert busy.end() == ""
    busy.start()
