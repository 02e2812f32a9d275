"""Settings of Sphinx (https://www.sphinx-doc.org/en/master/usage/configuration.html)."""

import os
import pathlib

_root = pathlib.Path(__file__).resolve().parents[2]

project = "zaya_jax"
html_title = "zaya_jax"
extensions = [
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "zaya_jax.site.code_links",
]
exclude_patterns = ["README.md", "configs", "api/*/modules.rst"]

# The API reference: a page per package, from docstrings in Google's form.
apidoc_modules = [
    {"path": str(_root / package), "destination": f"api/{package}"}
    for package in ("zaya_jax", "pallas_kernels")
    if os.environ.get("SITE_HAS_API") != "0"  # tests build small websites
]
os.environ["SPHINX_APIDOC_OPTIONS"] = "members"  # pages of packages ignore apidoc_automodule_options
apidoc_module_first = True
autodoc_default_options = {"ignore-module-all": True}  # a name is documented where it is defined
autodoc_member_order = "bysource"
autodoc_mock_imports = ["lm_eval"]  # an extra that is not needed to read the code
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # a list in the class: an attribute may be documented as a property too
python_maximum_signature_line_length = 80
toc_object_entries = False

# Markdown and notebooks.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_execution_excludepatterns = ["notebooks/needle.ipynb"]  # it trains for a quarter of an hour
nb_execution_timeout = 600
nb_output_stderr = "remove"

# Missing links are errors. Types in signatures often belong to other packages and are not checked.
nitpicky = True
nitpick_ignore_regex = [("py:(class|exc|data|meth|attr|func)", ".*"), ("py:obj", r"typing\..*")]
suppress_warnings = [
    "ref.python",  # several classes have a field of the same name; a type's name then links to one of them
    "docutils",  # markup of docstrings, such as a list without a blank line before it
]

html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
