"""Programs compiled for a cluster: their products, collectives, memory traffic, and modelled time."""
