"""The state of jobs and histories in Redis, and the models and processes that every part of a job uses."""
