"""The documentation as a folder of HTML, made of docstrings, configs, verbs, notebooks and a few pages.

`python -m zaya_jax.site OUT` builds it from a checkout, with Sphinx. Docstrings are read as Markdown from
the source, so that nothing of ours is imported for them. A link or a name that leads nowhere is an error.
"""
