"""The planner: pure functions from what is observed of a job to the actions that follow."""
