"""What people see: a snapshot as lines for a terminal, once or live, and as JSON."""
