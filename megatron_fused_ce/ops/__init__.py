"""The public functions: each turns its arguments into a call of the head, and names the results."""
