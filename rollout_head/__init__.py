"""The head of a job: the coordinator, sources of work, the relay to the history, and traces."""
