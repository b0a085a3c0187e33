"""Adapters for RL trainers. Each module imports the trainer that it is named after."""
