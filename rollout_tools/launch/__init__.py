"""Starts the processes of a job, on one machine or on several."""
