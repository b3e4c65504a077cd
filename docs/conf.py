"""The documentation site: `make docs` writes it to output/docs."""

from importlib.metadata import version as version_of

project = "jaxmpi"
copyright = "the authors of jaxmpi"
version = release = version_of("jaxmpi")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns: list = []

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# The docstrings are plain text with names in backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"jaxmpi {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_sourcelink = False
