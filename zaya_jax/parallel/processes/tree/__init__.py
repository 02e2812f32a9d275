"""Messages between the processes of a run over a tree: its shape, its protocol, connections and exchanges."""
