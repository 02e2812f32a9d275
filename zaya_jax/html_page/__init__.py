"""The frame of the HTML pages that `zaya aegis timeline` and `zaya report` write."""
