"""OpenTelemetry traces of requests, from their arrival to the history."""
