"""Training runs as one page: what they were, how they learned, and how they differ.

`metrics_file` reads the rows of a run, `thinning` makes them few, `run_record` has all that a run's folder
tells, `config_fields` compares configs, `charts` says what is drawn, `content` is the data of the page,
and `page` is the page.
"""
