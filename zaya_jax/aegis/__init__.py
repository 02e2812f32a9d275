"""A run that is watched: where it stands, what befell it, and what its time went into."""
