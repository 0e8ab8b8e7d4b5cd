"""Sphinx configuration. Builds without network: no intersphinx."""

import re

from sphinx.util.typing import stringify_annotation

from bagua_syncbn import ProcessGroupLike, __version__

project = "bagua_syncbn"
version = release = __version__
copyright = "the bagua_syncbn authors"

extensions = ["myst_parser", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "mathjax", "napoleon", "viewcode")]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/bagua-syncbn/bagua_syncbn",  # for "edit this page"
    "source_branch": "main",
    "source_directory": "docs/",
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"bagua_syncbn {version}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"_Module": "nn.Module"}  # in overloads
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def shorten(app, what, name, obj, options, signature, returns):
    """Writes the union of all process groups and torch's modules by the names that users write."""
    union = stringify_annotation(ProcessGroupLike, "smart")

    def short(text):
        return text and re.sub(r"[\w.~]*\b_?Module\b", "nn.Module", text.replace(union, "ProcessGroupLike"))

    return short(signature), short(returns)


def break_names(app, page, template, context, doctree):
    """Allows line breaks after punctuation in the names of tables, so that phones show more columns."""

    def broken(table):
        return re.sub(r"(?<=\w[._/(=])(?=\w)(?=[^<>]*</span>)", "<wbr>", table[0])

    context["body"] = re.sub(r"<table.*?</table>", broken, context.get("body", ""), flags=re.DOTALL)


def setup(app):
    app.connect("html-page-context", break_names)
    app.connect("autodoc-process-signature", shorten)
