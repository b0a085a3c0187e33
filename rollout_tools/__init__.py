"""Tools for people: the command line, the doctor, reports, and jobs on one machine."""
