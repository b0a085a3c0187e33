"""Weights of a trainer: checksums of directories, and sending from memory."""
