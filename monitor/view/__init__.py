"""The user's view of a snapshot: lines for a terminal, once or live, and JSON."""
