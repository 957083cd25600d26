"""Signatures of the core's methods for ``inspect.signature``, from the text that nanobind keeps."""

from __future__ import annotations

import ast
import re
from inspect import Parameter, Signature
from typing import Any


def signature_of(method: Any) -> Signature:
    """Return the signature of a method, without ``self`` if it is bound to an object."""
    if len(method.__nb_signature__) != 1:
        raise AttributeError("it has several signatures")
    text, _, defaults = method.__nb_signature__[0]
    # A default is a backslash and its number, which is no Python.
    source = re.sub(r"\\(\d+)", r"\1", text).replace("pgasdl._native.", "") + ": ..."
    try:
        function = ast.parse(source).body[0]
    except SyntaxError as error:
        raise AttributeError(f"no signature in {text}") from error
    assert isinstance(function, ast.FunctionDef)
    given, kinds = function.args, (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional: list[tuple[Any, ast.arg]] = [(kinds[0], each) for each in given.posonlyargs]
    positional += [(kinds[1], each) for each in given.args]
    values: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    values += given.defaults
    parameters = [
        Parameter(
            each.arg,
            kind,
            default=Parameter.empty if value is None else defaults[ast.literal_eval(value)],
            annotation=Parameter.empty if each.annotation is None else ast.unparse(each.annotation),
        )
        for (kind, each), value in zip(
            [*positional, *((Parameter.KEYWORD_ONLY, each) for each in given.kwonlyargs)],
            [*values, *given.kw_defaults],
            strict=True,
        )
    ]
    if hasattr(method, "__self__"):
        del parameters[0]
    returns = Signature.empty if function.returns is None else ast.unparse(function.returns)
    return Signature(parameters, return_annotation=returns)
