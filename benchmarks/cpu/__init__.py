"""One process: each op beside copying, and a step beside ``F.batch_norm``."""
