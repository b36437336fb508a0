"""Core: the table of operations as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from .operation import JSON_TYPE, Answer, Operation, Parameter
from .problems import PROBLEM_TYPE, Problem
from .shapes import ALSO, CONSTRAINTS

REF: Final = "#/components/schemas/{name}"
SAID: Final = {
    400: "The address, query, header or body is wrong.",
    401: "No valid token.",
    403: "The token's scopes don't reach so far.",
    404: "It is not there.",
    409: "The journal does not allow it (any more).",
    410: "It is over.",
    413: "Too large.",
    500: "A bug; the bridge's log says more.",
    503: "Not now: ask again.",
}


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document. Component schemas are those of the types themselves."""
    types = _types(operations)
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = dict(zip(types, schemas, strict=True))
    _constrain(components)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(
            operation, by_type
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Runfold bridge",
            "version": _version(),
            "summary": "Durable agent runs: start, follow, decide.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _version() -> str:
    try:
        return version("runfold")
    except PackageNotFoundError:  # out of a checkout that was not installed
        return "0"


def _types(operations: Sequence[Operation]) -> list[Any]:
    found: list[Any] = [Problem]
    for operation in operations:
        found += [operation.body] if operation.body is not None else []
        for one in operation.answers.values():
            found += [body for body in one.bodies.values() if not isinstance(body, dict)]
    return list(dict.fromkeys(found))


def _constrain(components: dict[str, Any]) -> None:
    for name, constraints in CONSTRAINTS.items():
        fields = components[name]["properties"]
        for field, schema in constraints.items():
            default = {"default": fields[field]["default"]} if "default" in fields[field] else {}
            fields[field] = schema | default
    for name, schema in ALSO.items():
        components[name].update(schema)


def _described(operation: Operation, by_type: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": _responses(operation, by_type),
    }
    if operation.scope is not None:
        found["security"] = [{"token": []}]
        found["description"] = f"Needs the scope `{operation.scope}`."
    if operation.parameters:
        found["parameters"] = [_parameter(one) for one in operation.parameters]
    if operation.body is not None:
        schema = by_type[operation.body]
        found["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": schema}}}
    return found


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.about,
        "schema": parameter.schema,
    }


def _responses(operation: Operation, by_type: dict[Any, Any]) -> dict[str, Any]:
    statuses = {*operation.problems, 403, 500}
    if operation.scope is not None:
        statuses |= {401, 503}
    found = {status: _problem(status, by_type) for status in sorted(statuses)}
    for status, one in operation.answers.items():
        found[status] = _answer(one, by_type)
    return {str(status): found[status] for status in sorted(found)}


def _problem(status: int, by_type: dict[Any, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {}
    if status == 503:
        headers["Retry-After"] = {"description": "Seconds.", "schema": {"type": "integer"}}
    found: dict[str, Any] = {
        "description": SAID[status],
        "content": {PROBLEM_TYPE: {"schema": by_type[Problem]}},
    }
    return found | ({"headers": headers} if headers else {})


def _answer(one: Answer, by_type: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": one.about}
    if one.bodies:
        found["content"] = {
            kind: {"schema": body if isinstance(body, dict) else by_type[body]}
            for kind, body in one.bodies.items()
        }
    if one.headers:
        found["headers"] = {
            name: {"description": said, "schema": {"type": "string"}}
            for name, said in one.headers.items()
        }
    return found
