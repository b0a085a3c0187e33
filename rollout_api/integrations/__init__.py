"""Adapters for RL trainers, each of which imports the trainer that it is named after, and training loggers."""
