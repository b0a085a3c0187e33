"""The client that a trainer uses to talk to a job."""
