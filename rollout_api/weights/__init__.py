"""Transfer of model weights from a trainer to engines: checksums and broadcasts."""
