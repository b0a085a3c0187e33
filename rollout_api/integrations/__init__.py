"""Adapters between a rollout job and RL trainers; each module imports the trainer that it is named after."""
