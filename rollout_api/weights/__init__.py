"""Model weights on their way from a trainer to the engines: checksums and broadcasts."""
