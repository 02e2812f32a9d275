"""Comparison of training runs in one HTML page: configuration, curves and differences.

`metrics_file` reads the rows of a run, `thinning` reduces their number, `run_record` collects the contents of
a run folder, `config_fields` compares configs, `charts` defines the charts, `content` prepares the data of
the page, and `page` writes it.
"""
