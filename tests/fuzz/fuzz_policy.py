"""Policies, in PGASDL_POLICY or a file, and the sizes and lists that commands take."""

from __future__ import annotations

import os

from pgasdl.collectives.policy import Policy, load
from pgasdl.errors import ConfigError
from pgasdl.simulate.cli import choices
from pgasdl.tools.text import parse_names, parse_sizes

_file = os.memfd_create("policy")


def one(data: bytes) -> None:
    """A policy prints as text with the same meaning; what is none is a ConfigError."""
    how, words = data[:1], data[1:]
    text = os.fsdecode(words)
    try:
        if how == b"@":
            os.ftruncate(_file, 0)
            os.pwrite(_file, words, 0)
            policy = load(f"@/proc/self/fd/{_file}")
        elif how == b"s":
            assert all(0 < size <= 1 << 36 for size in parse_sizes(text, 4))
            return
        elif how == b"n":
            assert set(parse_names(text, ("a", "b"), "letter")) <= {"a", "b"}
            return
        elif how == b"c":
            policy = Policy.parse("allreduce:0-inf:" + str(choices(text)[0]))
        else:
            policy = load(text)
    except ConfigError:
        return
    printed = str(policy)
    assert Policy.parse(printed) == policy
    assert str(Policy.parse(printed)) == printed
    for operation, rules in policy.rules:
        for rule in rules:
            assert policy.find(operation, rule.low) == rule.choice
