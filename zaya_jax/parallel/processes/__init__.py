"""The processes of a run: how they are numbered, connect, exchange values, and agree on when to stop."""
