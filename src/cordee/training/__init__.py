"""One worker's way through a run: its components, the session, checkpoints, online data, resuming."""
