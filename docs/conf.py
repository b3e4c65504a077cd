"""The documentation site: `make docs` writes it to output/docs."""

import ast
from importlib.metadata import version as version_of
from pathlib import Path

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


def write_programs(folder: Path, examples: Path) -> None:
    """Write a page for each example: the docstring, which is Markdown, the picture, if there is one, and the source."""
    folder.mkdir(exist_ok=True)
    for source in sorted(examples.glob("*.py")):
        first, _, rest = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")
        picture = folder.parent / "gallery" / f"{source.stem}.png"
        shown = f"![{first}](../gallery/{picture.name})\n\n" if picture.exists() else ""
        code = f"```{{literalinclude}} ../../examples/{source.name}\n```\n"
        (folder / f"{source.stem}.md").write_text(f"# {source.name}\n\n{first}\n\n{shown}{rest}\n\n## Source\n\n{code}")


write_programs(Path(__file__).parent / "programs", Path(__file__).parents[1] / "examples")
