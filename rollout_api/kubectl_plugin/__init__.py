"""The kubectl plugin ``kubectl rollouts``. It needs nothing but the program ``kubectl``."""
