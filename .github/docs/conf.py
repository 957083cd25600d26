"""How Sphinx builds the reference of the installed package; ``.ci/docs`` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import metadata
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pgasdl.settings.variables import VARIABLES
from pgasdl.tools.cli import _COMMANDS, cli

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
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
# Lines of 100 columns fit beside the two side bars.
html_theme_options = {"light_css_variables": {"code-font-size": "77%"}}

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


class Variables(SphinxDirective):
    """The table of settings, as the package has it."""

    def run(self) -> list[nodes.Node]:
        """Return a definition list."""
        lines = []
        for each in VARIABLES:
            lines += [f"``{each.name}``", f"   {each.doc}: {each.parser.accepted}. ", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Commands(SphinxDirective):
    """The help of every command."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command, and for each of its own."""
        return [section for name in _COMMANDS for section in self._sections(name, cli)]

    def _sections(self, name: str, group: click.Group, *before: str) -> Iterator[nodes.Node]:
        above = click.Context(cli, info_name=" ".join(["pgasdl", *before]))
        command = group.get_command(above, name)
        assert command is not None
        with click.Context(command, parent=above, info_name=name) as context:
            text = command.get_help(context)
        title = " ".join(["pgasdl", *before, name])
        section = nodes.section(ids=[nodes.make_id(title)])
        section += nodes.title(text=title)
        section += nodes.literal_block(text, text, language="none")
        yield section
        if isinstance(command, click.Group):
            for inner in command.list_commands(above):
                yield from self._sections(inner, command, *before, name)


def setup(app: Sphinx) -> None:
    """Connect the hook and the directives; Sphinx calls this."""
    app.connect("autodoc-process-signature", _shorten)
    app.add_directive("pgasdl-variables", Variables)
    app.add_directive("pgasdl-commands", Commands)
