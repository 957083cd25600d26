"""torchft's own tests over pgasdl in place of gloo: ``torchft_judge.py MODULE...``.

Left out are groups in processes of their own ("baby"), which are gloo's, and tests whose subject is
gloo: a short message that nobody receives is sent all the same here.
"""

from __future__ import annotations

import importlib
import re
import sys
import unittest
from typing import Any

from torchft import process_group

from pgasdl.torch.ft import ProcessGroupPgasdl

LEFT_OUT = re.compile("[Bb]aby|test_stalled_peer_._send")
GLOOS_WORDS, OUR_WORDS = "Connection closed by peer", "PeerLostError|Connection closed by peer"


def tests_of(name: str) -> unittest.TestSuite:
    module: Any = importlib.import_module(name)
    module.ProcessGroupGloo = ProcessGroupPgasdl
    found = unittest.TestSuite()
    for group in unittest.defaultTestLoader.loadTestsFromModule(module):
        found.addTests(test for test in group if not LEFT_OUT.search(test.id()))
    return found


def with_our_words(self: unittest.TestCase, kind: Any, words: Any, *more: Any, **named: Any) -> Any:
    if isinstance(words, str):
        words = words.replace(GLOOS_WORDS, OUR_WORDS)
    return _assert_raises_regex(self, kind, words, *more, **named)


_assert_raises_regex = unittest.TestCase.assertRaisesRegex

if __name__ == "__main__":
    unittest.TestCase.assertRaisesRegex = with_our_words  # type: ignore[assignment]
    process_group.ProcessGroupGloo = ProcessGroupPgasdl
    suite = unittest.TestSuite(map(tests_of, sys.argv[1:]))
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
