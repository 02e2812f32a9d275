"""Tool calls in generated text: the markup of templates, and parsers that turn it into calls."""
