"""What a recording shows, as numbers: pure functions, without plots and without Redis."""
