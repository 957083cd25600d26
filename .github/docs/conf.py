"""How Sphinx builds the reference of the installed package; ``.ci/docs`` runs it."""

from __future__ import annotations

from importlib.metadata import metadata
from typing import Any

from sphinx.application import Sphinx

_package = metadata("pgasdl")

project = "pgasdl"
author = _package["Author"]
copyright = f"2026, {author}"
version = release = _package["Version"]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "numpydoc",
]

html_theme = "furo"
html_title = f"pgasdl {release}"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

numpydoc_show_class_members = False
numpydoc_use_plots = False

autodoc_type_aliases = {
    "Array": "ndarray",
    "npt.ArrayLike": "ArrayLike",
    "npt.DTypeLike": "DTypeLike",
}


def _shorten(_app: Sphinx, _what: str, _name: str, _object: object, *rest: Any) -> Any:
    """Show a method of the native core as one of Python, and an alias by its name."""
    _options, signature, result = rest
    if signature is None:
        return None
    shown = signature.replace("(self, ", "(").replace("(self)", "()")
    names = {
        "pgasdl._native.SegmentCore": "Segment",
        "pgasdl._native.": "",
        "TypeAliasForwardRef('DTypeLike')": "DTypeLike",
    }
    for long, short in names.items():
        shown = shown.replace(long, short)
    return shown, result


def setup(app: Sphinx) -> None:
    """Connect the hook; Sphinx calls this."""
    app.connect("autodoc-process-signature", _shorten)
