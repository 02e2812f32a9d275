"""Copies of the train state in the memory of other nodes: written while a run trains, read when it restarts.

Each process copies the shards that its devices own to the memory of its node, and sends them to a process of
the next node (`copying`). At a start the processes exchange what their nodes still have, and restore the
newest complete step without the storage, if no checkpoint there is newer (`restart`).
"""
